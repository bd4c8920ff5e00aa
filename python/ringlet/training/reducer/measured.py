"""Merging by measurement: times a group and a model, cuts the buckets by them, and keeps the faster of two layouts.

It counts reduced backwards. It ignores the first 2 (the first lays buckets out anew). The next 5, on plain buckets,
give the gradients' ready times. Then merged and plain buckets take turns; the first backward of each turn does not
count. The medians of the turns decide. All times are maxima over ranks, so every rank decides the same.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ringlet.training.agree import largest_of_ranks
from ringlet.training.flat import allocate

from . import buckets, merging
from .channel import Channel
from .timeline import Timeline, now_ns

UNSEEN, SAMPLES = 1, 5
TURNS = ("plain", "merged", "plain", "merged")
WORTH_IT = 0.98  # of the plain layout's time; less may be noise
SMALLEST_BYTES, LARGEST_BYTES, REPEATS = 4 << 10, 32 << 20, 7


def measure_cost(channel: Channel, device: torch.device, most_bytes: int) -> merging.Cost:
    """alpha and beta of `channel`, from all-reduces of up to `most_bytes`. Collective; the same on all ranks."""
    largest = min(max(most_bytes, 16 * SMALLEST_BYTES), LARGEST_BYTES)
    buffer = allocate(largest // 4, torch.float32, device, channel.group)
    sizes, medians = [], []
    size = SMALLEST_BYTES
    while size <= largest:
        times = []
        for _ in range(REPEATS):
            started = now_ns()
            channel.all_reduce(buffer[: size // 4], dist.ReduceOp.AVG).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((now_ns() - started) * 1e-9)
        sizes.append(size)
        medians.append(statistics.median(times))
        size *= 4
    return merging.fit(sizes, largest_of_ranks(medians, channel.group, device))


class MeasuredMerging:
    """Chooses bucket bounds over the first reduced backwards of a training; `kept` is None until it is decided."""

    def __init__(self, entries: list[buckets.Entry], channel: Channel, device: torch.device) -> None:
        self._entries, self._channel, self._device = entries, channel, device
        self._plans: dict[str, list[buckets.Bucket]] = {}
        self._ready: list[dict[int, int]] = []
        self._durations: list[list[float]] = [[] for _ in TURNS]
        self._turn, self._count = 0, -UNSEEN
        self.kept: str | None = None
        self._stats: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """For `GradientReducer.stats()`: measured and predicted times in seconds, and the layout that was kept."""
        return {"kept": self.kept, **self._stats}

    def observe(self, timeline: Timeline, plan: list[buckets.Bucket]) -> list[buckets.Bucket] | None:
        """Observes one reduced backward on `plan`. Returns the plan to change to, if any. Collective."""
        if self.kept is not None or not timeline.arrivals:
            return None
        self._plans.setdefault("plain", plan)
        self._count += 1
        if self._count <= 0:
            return None
        self._durations[self._turn].append((timeline.finished_ns - timeline.begin_ns) * 1e-9)
        if self._turn == 0:
            begin, ended = timeline.begin_ns, timeline.ended_ns
            times = timeline.arrivals
            self._ready.append({i: times.get(i, ended) - begin for i in range(len(self._entries))})
        return self._next_turn() if self._count == SAMPLES else None

    def _next_turn(self) -> list[buckets.Bucket] | None:
        self._turn, self._count = self._turn + 1, -1
        if self._turn == 1:
            self._plans["merged"] = self._merge()
        if self._plans["merged"] == self._plans["plain"]:
            self._keep("plain")
            return None
        if self._turn < len(TURNS):
            return self._plans[TURNS[self._turn]]
        medians = [statistics.median(times) for times in self._durations]
        turns = largest_of_ranks(medians, self._channel.group, self._device)
        # A machine that is slow during one turn must not decide: merged has to win at its worst against plain's best.
        plain = min(took for name, took in zip(TURNS, turns, strict=True) if name == "plain")
        merged = max(took for name, took in zip(TURNS, turns, strict=True) if name == "merged")
        self._stats["measured_s"] = {"plain": plain, "merged": merged}
        return self._keep("merged" if merged < WORTH_IT * plain else "plain")

    def _keep(self, name: str) -> list[buckets.Bucket]:
        self.kept = name
        counts, measured = self._stats["buckets"], self._stats.get("measured_s")
        took = "" if measured is None else "".join(f", {kind} took {s * 1e3:.2f} ms" for kind, s in measured.items())
        self._channel.tell(
            f"merging keeps the {name} layout ({counts['plain']} buckets plain, {counts['merged']} merged{took})"
        )
        return self._plans[name]

    def _merge(self) -> list[buckets.Bucket]:
        """The plan whose few buckets end early in the model. Each dtype and device has its own cuts."""
        count = len(self._entries)
        medians = [statistics.median(seen[i] for seen in self._ready) * 1e-9 for i in range(count)]
        ready = largest_of_ranks(medians, self._channel.group, self._device)
        cost = measure_cost(self._channel, self._device, sum(entry.nbytes for entry in self._entries))
        order = sorted(range(count), key=lambda index: (ready[index], index))
        groups = []
        for kind in dict.fromkeys((self._entries[i].dtype, self._entries[i].device) for i in order):
            alike = [i for i in order if (self._entries[i].dtype, self._entries[i].device) == kind]
            cuts = merging.cut_with_few([ready[i] for i in alike], [self._entries[i].nbytes for i in alike], cost)
            groups += [[alike[place] for place in cut] for cut in cuts]
        plan = buckets.lay_out(self._entries, groups, order)
        nbytes = [entry.nbytes for entry in self._entries]
        self._stats["cost"] = asdict(cost)
        self._stats["predicted_s"] = {
            name: merging.end_of([[slot.index for slot in b.slots] for b in found], ready, nbytes, cost)
            for name, found in (("plain", self._plans["plain"]), ("merged", plan))
        }
        self._stats["buckets"] = {"plain": len(self._plans["plain"]), "merged": len(plan)}
        return plan
