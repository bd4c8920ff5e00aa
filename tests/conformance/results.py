"""Results of the suite: one row a test and world, and what may be said of two sets of them.

A row: test, backend, world, outcome ("ok", "skipped", "failed"), why (of a skip: the suite's reason; of a failure: its
last line), kept_out (the reason with which the suite, its gates closed, would have skipped it) and torch's version.
A file keeps rows that differ in their world alone as one, with "worlds".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FOLDER = Path(__file__).parent
REFERENCE = FOLDER / "gloo_reference.jsonl"
RESULTS = FOLDER / "ringlet_results.jsonl"

# Skips that no CPU backend on one host can help: what is missing is a device, a wheel or more ranks.
LACKS = {
    "GPUs": re.compile(r"CUDA|cuda|GPU|[Nn]ccl|NCCL|Ucc"),
    "another world": re.compile(r"world ?size"),
    "torchvision": re.compile(r"torchvision"),
    "nothing: torch skips it everywhere": re.compile(r"github\.com/pytorch/pytorch/|flakiness"),
}


def lack_of(row: Row) -> str | None:
    """What a skipped test lacks; None for a reason that is not among those that excuse."""
    return next((lack for lack, pattern in LACKS.items() if pattern.search(row["why"])), None)


def read(path: Path) -> list[Row]:
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{**row, "world": world} for row in kept for world in row.pop("worlds")]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Ordered, and without what differs from run to run."""
    worlds: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["test"], row["world"])):
        rest = {key: value for key, value in row.items() if key not in ("seconds", "world")}
        worlds.setdefault(json.dumps(rest), []).append(row["world"])
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({**json.loads(rest), "worlds": where}) + "\n" for rest, where in worlds.items())
    path.write_text("".join(lines), encoding="utf-8")


def shortcomings(rows: Iterable[Row], reference: Iterable[Row]) -> list[str]:
    """What keeps `rows` from conforming: failures, skips where gloo passes, skips without an excuse."""
    passes = {(row["test"], row["world"]) for row in reference if row["outcome"] == "ok"}
    found = []
    for row in rows:
        named = f"{row['test']} at world {row['world']}"
        if row["outcome"] == "failed":
            found.append(f"{named} failed: {row['why']}")
        elif row["outcome"] == "skipped" and (row["test"], row["world"]) in passes:
            found.append(f"{named} was skipped ({row['why']}), and gloo passes it")
        elif row["outcome"] == "skipped" and lack_of(row) is None:
            found.append(f"{named} was skipped without an excuse: {row['why']}")
    return found
