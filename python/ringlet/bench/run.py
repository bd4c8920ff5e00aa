"""Runs a sweep: all libraries at once, measured in turns.

    for each round: for each collective and size: for each library and way of using it, in an order drawn anew:
        one measurement

So measurements that are compared lie within a second, and if the machine's speed drifts, it drifts for all of them. A
measurement is one checked call, warm-up, and as many calls as fill `sample_ms`, by the same rule for every library.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .cases import Config, Sweep, bus_factor
from .jobs import Job
from .ranks.case import Case

# From this duration on, a sample is one call. On a GPU the host waits for it once a sample, which takes long.
_SAMPLE_US = {"cpu": 20.0, "cuda": 1000.0}
_MAX_BATCH = 100
_MIN_SAMPLES, _MAX_CALLS = 5, 20000
# Large calls need no long warm-up: their plan is made and their pages are touched by the first.
_LARGE_BYTES, _LARGE_WARMUP = 16 << 20, 2

Row = dict[str, Any]


@dataclass
class Outcome:
    """The result of a sweep: `rows`, in the order of measurement, with exactly the keys of the JSON lines."""

    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


# (row just measured or None if refused, measurements done, measurements in all)
Watcher = Callable[[Row | None, int, int], None]


def run(sweep: Sweep, watch: Watcher = lambda row, done, total: None) -> Outcome:
    """Measure everything. Raises BenchError, with nothing left running, if a rank dies."""
    outcome, configs, done = Outcome(), sweep.configs(), 0
    total = sum(len(sweep.cases(world, config)) for world in sweep.worlds for config in configs) * sweep.rounds
    for world in sweep.worlds:
        with sweep.jobs(world) as jobs:
            for name, job in jobs.items():
                library = name.partition("/")[0]
                outcome.versions |= {library: job.version} if job.version else {}
                outcome.settings |= {f"{library}, {world} ranks": job.settings} if job.settings else {}
            for turn, (config, case, round_) in enumerate(turns(sweep, world, configs)):
                row, name = None, sweep.named(config, case)
                if name not in outcome.refused:
                    prepared = _prepare(sweep, jobs[config.job], case, turn)
                    if "refused" in prepared[0]:
                        outcome.refused[name] = prepared[0]["refused"]
                    else:
                        row = _measure(sweep, jobs[config.job], config, case, prepared) | {"round": round_}
                        outcome.rows.append(row)
                done += 1
                watch(row, done, total)
    return outcome


def turns(sweep: Sweep, world: int, configs: list[Config]) -> Iterator[tuple[Config, Case, int]]:
    """The order of measurements: every configuration once per (round, collective, size), in a new order each time."""
    cases = {config: sweep.cases(world, config) for config in configs}
    shuffler = random.Random(0)
    for round_ in range(sweep.rounds):
        for index in range(len(cases[configs[0]]) if configs else 0):
            for config in shuffler.sample(configs, len(configs)):
                yield config, cases[config][index], round_


def plan_samples(sweep: Sweep, call_us: float) -> tuple[int, int]:
    """(samples, calls per sample) for a call that takes `call_us`."""
    call_us = max(call_us, 0.05)
    calls = sweep.iterations or min(_MAX_CALLS, math.ceil(sweep.sample_ms * 1000 / call_us))
    batch = max(1, min(_MAX_BATCH, math.ceil(_SAMPLE_US[sweep.device] / call_us), calls))
    return max(calls // batch, 1 if sweep.iterations else _MIN_SAMPLES), batch


def _prepare(sweep: Sweep, job: Job, case: Case, seed: int) -> list[dict[str, Any]]:
    """Every rank's answer: the result of its check and warm-up, or the reason why its library cannot do this."""
    warmup = min(sweep.warmup, _LARGE_WARMUP) if case.bytes >= _LARGE_BYTES else sweep.warmup
    told = {"case": asdict(case) | {"op": sweep.op}, "seed": seed, "warmup": warmup, "check": sweep.check}
    return job.ask({"do": "prepare", **told}, sweep.timeout_s)


def _measure(sweep: Sweep, job: Job, config: Config, case: Case, prepared: list[dict[str, Any]]) -> Row:
    """A row, with its keys in their order, but without the round."""

    def timed(samples: int, batch: int) -> list[dict[str, Any]]:
        return job.ask({"do": "measure", "samples": samples, "batch": batch}, sweep.timeout_s)

    estimate_us = max(answer["estimate_us"] for answer in prepared)
    if not sweep.iterations and estimate_us * _MAX_BATCH < sweep.sample_ms * 1000:
        # A few single calls, each with the clock's cost and after a pause, say little about many short ones.
        found = timed(_MIN_SAMPLES, plan_samples(sweep, estimate_us)[1])
        estimate_us = max(answer["p50"] for answer in found)
    samples, batch = plan_samples(sweep, estimate_us)
    found = timed(samples, batch)
    least, median, high = (max(answer[key] for answer in found) for key in ("min", "p50", "p99"))
    algbw = case.bytes / median / 1000
    wrong = [answer["wrong"] for answer in prepared]
    return {
        "library": config.library,
        "collective": case.collective,
        "algorithm": case.algorithm,
        "transport": prepared[0]["transport"],
        **asdict(case),  # the rest of it: memory, ..., op
        "time_us_min": round(least, 4),
        "time_us_p50": round(median, 4),
        "time_us_p99": round(high, 4),
        "algbw_gbps": float(f"{algbw:.5g}"),
        "busbw_gbps": float(f"{algbw * bus_factor(case.collective, case.world, config.library):.5g}"),
        "wrong": None if wrong[0] is None else sum(wrong),
        "uplink_bytes": found[0].get("uplink_bytes"),
    }
