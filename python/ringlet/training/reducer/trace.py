"""One reduced backward in the Trace Event Format, which chrome://tracing and ui.perfetto.dev show.

A process is a rank; its rows are the backward with its gradients, the buckets on the wire and the exposed time. Times
are microseconds of the host's monotonic clock, so the files of one host's ranks line up when their events are joined.
Source: Google's Trace Event Format, as chrome://tracing documents it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ringlet.errors import InvalidUsage, ResourceError

from .timeline import Timeline

BACKWARD, GRADIENTS, EXPOSED, COMMUNICATION = range(4)  # rows; buckets under way together need more from the last on
_TITLES = {BACKWARD: "backward", GRADIENTS: "gradients ready", EXPOSED: "exposed"}


def save(timeline: Timeline, names: list[str], rank: int, path: str | os.PathLike[str]) -> None:
    """Writes `timeline` to `path`; `names` are those of the parameters, by index."""
    if not timeline.buckets:
        raise InvalidUsage("save_trace: no backward has been reduced yet")
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events(timeline, names, rank)})
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ResourceError(f"save_trace: {error}") from error


def events(timeline: Timeline, names: list[str], rank: int) -> list[dict[str, Any]]:
    """Bars, each with its row (`tid`), and before them the names of the rows."""
    bars = [_bar(rank, BACKWARD, "backward", timeline.begin_ns, timeline.ended_ns)]
    before = timeline.begin_ns
    for index, at in sorted(timeline.arrivals.items(), key=lambda arrival: arrival[1]):
        bars.append(_bar(rank, GRADIENTS, names[index], before, at))
        before = at
    free_at: list[int] = []  # when each row of communication ends
    for place, bucket in enumerate(timeline.buckets):
        row = next((row for row, end in enumerate(free_at) if end <= bucket.launched_ns), len(free_at))
        free_at[row : row + 1] = [bucket.done_ns]
        bar = _bar(rank, COMMUNICATION + row, f"bucket {place}", bucket.launched_ns, bucket.done_ns)
        bar["args"] = {
            "bytes": bucket.nbytes,
            "parameters": [names[index] for index in bucket.indices],
            "full_before_launch_us": (bucket.launched_ns - timeline.ready_ns(bucket)) / 1000,
        }
        bars.append(bar)
    exposed_from = timeline.finished_ns - timeline.exposed_ns
    bars.append(_bar(rank, EXPOSED, "exposed", exposed_from, timeline.finished_ns))
    titles = _TITLES | {COMMUNICATION + row: "communication" for row in range(len(free_at))}
    return [_title(rank, None, f"rank {rank}"), *(_title(rank, row, title) for row, title in titles.items()), *bars]


def _bar(rank: int, row: int, name: str, from_ns: int, to_ns: int) -> dict[str, Any]:
    duration_us = max(0, to_ns - from_ns) / 1000
    return {
        "ph": "X",
        "cat": "ringlet",
        "pid": rank,
        "tid": row,
        "name": name,
        "ts": from_ns / 1000,
        "dur": duration_us,
    }


def _title(rank: int, row: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if row is None else "thread_name"
    return {"ph": "M", "pid": rank, "tid": row or 0, "name": kind, "args": {"name": name}}
