"""The measured figures of the pages: each is read from the results file that it links to. docs/generate.py writes them.

A table is a list of lines of cells. A figure is a short text that stands within a sentence.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.clusters import Cluster
from benchmarks.page import read
from benchmarks.uplinks import stream_times, uplink_factor

from ringlet.bench.cases import Config, format_bytes
from ringlet.bench.results import Comparison, Meta, Row, compare, config_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MAIN = "2026-11-28-intel-xeon-2-cores-main"
TORCH = "2026-11-28-intel-xeon-2-cores-torch"
OVERSUBSCRIBED = "2026-11-23-intel-xeon-2-cores-oversubscribed"
COLLECTIVES = "2026-11-20-intel-xeon-2-cores-collectives"
ALLOCATOR = "2026-11-20-intel-xeon-2-cores-allocator"
HOSTS = "2026-11-22-amd-epyc-2-cores-hosts"
UNSHAPED = "2026-11-22-amd-epyc-2-cores-hosts-unshaped"
RENO = "2026-11-22-amd-epyc-2-cores-hosts-unshaped-reno"
CONTENTION = "2026-11-22-amd-epyc-2-cores-contention"
ZERO_MEMORY = "2026-11-20-intel-xeon-2-cores-zero-memory"
DELAY = "2026-11-24-intel-xeon-2-cores-delayed-gradients"
BITS = "2026-11-24-intel-xeon-2-cores-bucket-bits"
COST = "2026-11-27-amd-epyc-2-cores-reproducible-cost"
DIGESTS = "2026-11-27-amd-epyc-2-cores-reproducible-digests"

README_SIZES = [4, 1 << 10, 4 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 256 << 20]
MPI, GLOO = "best MPI", "gloo"
# Rows of the table of ratios: what was measured, results, ranks, peer.
RATIOS = [
    ("all-reduce, 2 ranks", MAIN, 2, MPI),
    ("all-reduce, 2 ranks, `torch.distributed`", TORCH, 2, GLOO),
    ("all-reduce, 4 ranks on 2 cores", OVERSUBSCRIBED, 4, MPI),
    ("all-reduce, 8 ranks on 2 cores", OVERSUBSCRIBED, 8, MPI),
    ("13 collectives, 2 ranks, `torch.distributed`", COLLECTIVES, 2, GLOO),
    ("13 collectives, 4 ranks on 2 cores, `torch.distributed`", COLLECTIVES, 4, GLOO),
    ("all-reduce, 4 hosts, 200 Mbit/s", HOSTS, 4, GLOO),
    ("all-reduce, 4 hosts, 200 Mbit/s", HOSTS, 4, MPI),
    ("all-reduce, 2 hosts, no limit, peers on BBR", UNSHAPED, 2, GLOO),
    ("all-reduce, 2 hosts, no limit, all on reno", RENO, 2, GLOO),
]


@functools.cache
def results(name: str) -> tuple[list[Row], Meta]:
    return read(BENCHMARKS / "baselines" / f"{name}.jsonl")


@functools.cache
def comparisons(name: str, world: int, rivals: str, memory: str) -> tuple[Comparison, ...]:
    """`auto` against the rivals, one of each collective."""
    rows, _ = results(name)
    found = [one for one in compare(rows) if (one.call.world, one.rivals) == (world, rivals)]
    return tuple(one for one in found if (one.config.algorithm, one.config.memory) == ("auto", memory))


def page_table(name: str, begins: str) -> list[list[str]]:
    """The table of a results page whose header line begins with these words, its header first."""
    lines = (BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(begins))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [cells[0], *cells[2:]]


def ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x" if value < 100 else f"{value:.0f}x"


def readme_table() -> list[list[str]]:
    """How many times faster: ringlet's two kinds of memory against the fastest MPI and against gloo."""
    columns = [
        comparisons(name, 2, rivals, memory)[0].ratios
        for name, rivals in ((MAIN, MPI), (TORCH, GLOO))
        for memory in ("registered", "ordinary")
    ]
    header = ["size", "best MPI, registered", "best MPI, ordinary", "gloo, registered", "gloo, ordinary"]
    lines = [[format_bytes(size), *(ratio(column[size]) for column in columns)] for size in README_SIZES]
    least = [min(column.items(), key=lambda item: item[1]) for column in columns]
    lines.append([f"least of {len(columns[0])} sizes", *(f"{ratio(r)} ({format_bytes(s)})" for s, r in least)])
    lines.append(["geometric mean", *(ratio(statistics.geometric_mean(column.values())) for column in columns)])
    return [header, *lines]


def ratio_table() -> list[list[str]]:
    """Least, most and mean of every comparison with `auto`."""
    lines = [["what", "memory", "peer", "sizes", "least", "most", "geometric mean"]]
    for what, name, world, rivals in RATIOS:
        for memory in ("registered", "ordinary"):
            of_collectives = comparisons(name, world, rivals, memory)
            if of_collectives:
                peer = "Open MPI" if rivals == MPI and name == HOSTS else rivals
                lines.append([what, memory, peer, *_extremes(of_collectives)])
    return lines


def _extremes(of_collectives: Iterable[Comparison]) -> list[str]:
    found = [(value, size, one.call.collective) for one in of_collectives for size, value in one.ratios.items()]
    several = len({collective for _, _, collective in found}) > 1

    def told(one: tuple[float, int, str]) -> str:
        value, size, collective = one
        return f"{ratio(value)} ({f'{collective}, ' if several else ''}{format_bytes(size)})"

    sizes = sorted({size for _, size, _ in found if size})
    mean = ratio(statistics.geometric_mean(value for value, _, _ in found))
    return [f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}", told(min(found)), told(max(found)), mean]


def bound_table() -> list[list[str]]:
    """Emulated hosts behind a limit: what share of the bound a library reaches at the largest size."""
    rows, meta = results(HOSTS)
    times = stream_times(rows)
    size = max(row["bytes"] for row in rows)
    least = uplink_factor("all_reduce", Cluster(**meta["cluster"]))
    names = [(str(config), least / told) for (at, config), told in times.items() if at == size]
    header = [f"all-reduce of {format_bytes(size)}", "share of the bound"]
    return [header, *([name, f"{share:.1%}"] for name, share in sorted(names, key=lambda one: -one[1]))]


def allocator_worth() -> list[list[str]]:
    """By size: time with ordinary tensors over time with the registered allocator's, within a round."""
    rows, _ = results(ALLOCATOR)
    times = {
        (row["world"], row["bytes"], row["memory"], row["round"]): row["time_us_p50"]
        for row in rows
        if row["library"] == "ringlet"
    }
    worlds, sizes = (sorted({key[place] for key in times}) for place in (0, 1))
    lines = [["size", *(f"{world} ranks{' on 2 cores' if world > 2 else ''}" for world in worlds)]]
    for size in sizes:
        medians = []
        for world in worlds:
            rounds = [key[3] for key in times if key[:3] == (world, size, "allocator")]
            pairs = [times[world, size, "ordinary", r] / times[world, size, "allocator", r] for r in rounds]
            medians.append(ratio(statistics.median(pairs)))
        lines.append([format_bytes(size), *medians])
    return lines


def zero_table() -> list[list[str]]:
    rows = page_table(ZERO_MEMORY, "| ranks |")
    wanted = [rows[0].index(name) for name in ("ranks", "stage", "predicted", "counted", "/ all-reduce")]
    header = ["ranks", "stage", "predicted MB", "counted MB", "sent / all-reduce"]
    return [header, *([row[place] for place in wanted] for row in rows[1:])]


def figures() -> dict[str, str]:
    """Name -> the figure, for the marks within sentences."""
    return {**_algorithm_figures(), **_contention_figures(), **_delay_figures(), **_cost_figures()}


def _algorithm_figures() -> dict[str, str]:
    """Of 2 ranks on registered memory at 16 MiB, in times of two_shot."""

    def p50(algorithm: str) -> float:
        wanted = Config("ringlet", algorithm, "registered", "api")
        rows = [row for row in results(MAIN)[0] if row["bytes"] == 16 << 20]
        return statistics.median(row["time_us_p50"] for row in rows if config_of(row) == wanted)

    return {f"{name} / two_shot": f"{p50(name) / p50('two_shot'):.2f}" for name in ("ring", "butterfly")}


def _contention_figures() -> dict[str, str]:
    header, *lines = page_table(CONTENTION, "| cluster |")
    cases = [dict(zip(header, cells, strict=True)) for cells in lines]
    off = [abs(int(case["off by"].removesuffix(" %"))) for case in cases]
    counted = [abs(float(case["counted"]) / float(case["predicted"]) - 1) for case in cases]
    return {
        "contention cases": str(len(cases)),
        "contention bytes": f"{max(counted):.1%}",
        "contention within 10 %": str(sum(value <= 10 for value in off)),
        "contention most": f"{max(off)}%",
    }


def _delay_figures() -> dict[str, str]:
    losses = [float(line[2]) / float(line[1]) - 1 for line in page_table(DELAY, "| learning rate |")[1:]]
    return {"delay least": f"{min(losses):.0%}", "delay most": f"{max(losses):.0%}"}


def _cost_figures() -> dict[str, str]:
    """Processor time of reproducible steps over that of plain ones."""
    header, *lines = page_table(COST, "| model | parameters |")
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line[header.index("way")], []).append(float(line[header.index("processor time")]))
    told = {way: f"{min(ratios):.2f} to {max(ratios):.2f}" for way, ratios in found.items()}
    return {"cost of the reducer": told["GradientReducer"], "cost of Zero": told["Zero stage 1"]}


def tables() -> dict[str, dict[str, list[list[str]]]]:
    """Page -> name of a table in it -> its lines."""
    return {
        "../README.md": {"measured": readme_table()},
        "performance.md": {
            "ratios": ratio_table(),
            "bound": bound_table(),
            "allocator worth": allocator_worth(),
            "allocator cost": page_table(f"{ALLOCATOR}-cost", "| | torch's"),
        },
        "gradients.md": {
            "bits": page_table(BITS, "| bucket"),
            "delay": page_table(DELAY, "| learning rate |"),
            "cost": page_table(COST, "| model | parameters |"),
            "digests": page_table(DIGESTS, "| model | way |"),
        },
        "zero.md": {"memory": zero_table()},
    }
