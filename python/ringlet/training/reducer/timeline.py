"""The times of one backward and its reduction, and the sums over all backwards.

Host clock, nanoseconds of time.perf_counter_ns. On a GPU these are times of launching, not of running.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch

now_ns = time.perf_counter_ns
_NO_RANGE = contextlib.nullcontext()


def ranges(name: str) -> contextlib.AbstractContextManager[object]:
    """A range in the traces of torch.profiler, if it is on."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else _NO_RANGE


@dataclass
class BucketTimes:
    """One bucket, which holds the gradients of `indices`: when the backend got it, when it was reduced."""

    nbytes: int
    indices: tuple[int, ...]
    launched_ns: int = 0
    done_ns: int = 0


@dataclass
class Timeline:
    """One reduced backward. `arrivals`: (index, time) of gradients, each parameter's last one, in order.

    `ended_ns`: this rank's own backward ended. `finished_ns`: the averages are in place.
    `exposed_ns`: how long the rank waited for the averages.
    """

    begin_ns: int = 0
    arrivals: dict[int, int] = field(default_factory=dict)
    ended_ns: int = 0
    finished_ns: int = 0
    exposed_ns: int = 0
    buckets: list[BucketTimes] = field(default_factory=list)

    def arrive(self, index: int) -> None:
        self.arrivals.pop(index, None)
        self.arrivals[index] = now_ns()

    def ready_ns(self, bucket: BucketTimes) -> int:
        """When the bucket's last gradient arrived; one that did not arrive was ready when the backward ended."""
        return max(self.arrivals.get(index, self.ended_ns) for index in bucket.indices)

    @property
    def communication_ns(self) -> int:
        """The time with at least one bucket under way."""
        busy = free_at = 0
        for bucket in self.buckets:
            busy += max(0, bucket.done_ns - max(bucket.launched_ns, free_at))
            free_at = max(free_at, bucket.done_ns)
        return busy


@dataclass
class Totals:
    """Sums over all reduced backwards, and the latest one."""

    backwards: int = 0
    launches: int = 0
    communication_ns: int = 0
    exposed_ns: int = 0
    latest: Timeline = field(default_factory=Timeline)

    def add(self, timeline: Timeline) -> None:
        self.backwards += 1
        self.launches += len(timeline.buckets)
        self.communication_ns += timeline.communication_ns
        self.exposed_ns += timeline.exposed_ns
        self.latest = timeline

    def describe(self, names: list[str]) -> dict[str, Any]:
        """The times of `GradientReducer.stats()`, in seconds."""
        latest, begin = self.latest, self.latest.begin_ns
        communication, exposed = latest.communication_ns, latest.exposed_ns
        rows = []
        for bucket in latest.buckets:
            row: dict[str, Any] = {"bytes": bucket.nbytes, "parameters": [names[index] for index in bucket.indices]}
            row["ready_s"] = (latest.ready_ns(bucket) - begin) * 1e-9
            row["launched_s"] = (bucket.launched_ns - begin) * 1e-9
            row["done_s"] = (bucket.done_ns - begin) * 1e-9
            rows.append(row)
        return {
            "ready_order": [names[index] for index in latest.arrivals],
            "ready_s": [(at - begin) * 1e-9 for at in latest.arrivals.values()],
            "buckets": rows,
            "backwards": self.backwards,
            "launches": self.launches,
            "backward_s": (latest.ended_ns - begin) * 1e-9,
            "communication_s": communication * 1e-9,
            "overlapped_s": max(0, communication - exposed) * 1e-9,
            "exposed_s": exposed * 1e-9,
            "total_communication_s": self.communication_ns * 1e-9,
            "total_exposed_s": self.exposed_ns * 1e-9,
        }
