"""The tables of docs/conformance.md, from the stored rows (results.py); docs/generate.py writes them into the page."""

from __future__ import annotations

from collections import Counter

import results
from results import Row

Cells = list[list[str]]


def tables() -> dict[str, Cells]:
    """Name of a table -> its header and lines."""
    stored = {"gloo": results.read(results.REFERENCE), "ringlet": results.read(results.RESULTS)}
    return {"counts": _counts(stored), "tests": _tests(stored), "skips": _skips(stored["ringlet"])}


def _worlds(stored: dict[str, list[Row]]) -> list[int]:
    return sorted({row["world"] for rows in stored.values() for row in rows})


def _counts(stored: dict[str, list[Row]]) -> Cells:
    lines = [["backend", "world", "ok", "of them kept out by torch", "failed", "skipped"]]
    for backend, rows in stored.items():
        for world in _worlds(stored):
            here = [row for row in rows if row["world"] == world]
            count = Counter(row["outcome"] for row in here)
            let_in = sum(row["outcome"] == "ok" and row["kept_out"] is not None for row in here)
            numbers = (world, count["ok"], let_in, count["failed"], count["skipped"])
            lines.append([f"`{backend}`", *map(str, numbers)])
    return lines


def _tests(stored: dict[str, list[Row]]) -> Cells:
    """Every test that some backend runs at some world."""
    places = [(backend, world) for world in _worlds(stored) for backend in stored]
    lines = [["test", *(f"{backend} {world}" for backend, world in places)]]
    found = {(row["test"], backend, row["world"]): row for backend, rows in stored.items() for row in rows}
    for test in sorted({test for test, _, _ in found}):
        here = [found.get((test, backend, world)) for backend, world in places]
        if any(row and row["outcome"] != "skipped" for row in here):
            lines.append([f"`{test.removeprefix('test_')}`", *(_cell(row) for row in here)])
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["outcome"] == "skipped":
        return f"needs {results.lack_of(row) or row['why']}"
    let_in = row["kept_out"] is not None and row["backend"] == "gloo"
    return row["outcome"] + (", let in" if let_in else "")


def _skips(rows: list[Row]) -> Cells:
    """What the tests that run nowhere lack."""
    ran = {row["test"] for row in rows if row["outcome"] != "skipped"}
    lacks: dict[str, set[str]] = {}
    for row in rows:
        if row["test"] not in ran:
            lacks.setdefault(row["test"], set()).add(results.lack_of(row) or row["why"])
    count = Counter(", ".join(sorted(lack)) for lack in lacks.values())
    return [["needs", "tests"], *([lack, str(tests)] for lack, tests in count.most_common())]
