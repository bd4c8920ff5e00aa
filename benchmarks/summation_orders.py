#!/usr/bin/env python3
"""Reveals the summation orders of the libraries of docs/numerics.md, a JSON line each.

python benchmarks/summation_orders.py benchmarks/baselines/DATE-summation-orders.jsonl [MODULE:FUNCTION ...]
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ringlet.cli.main import main
from ringlet.schedule import algorithms
from ringlet.schedule.collectives import REDUCTIONS

LIBRARIES = ("gloo", "openmpi", "mpich", "intelmpi")
WORLDS = (3, 4, 8)


def commands(own: list[str]) -> Iterator[str]:
    """Of other libraries in some worlds, of ringlet's algorithms in one, where the prover has their trees."""
    for target in (*LIBRARIES, *own):
        for world in WORLDS:
            yield f"reveal {target} -n {world}"
    for algorithm, collective, _ in algorithms():
        if collective in REDUCTIONS:
            for dtype in ("float32", "bfloat16"):
                yield f"reveal ringlet:{algorithm} -n 4 --collective {collective} --dtype {dtype} --sizes 4K"


def run(file: Path, own: list[str]) -> int:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        for command in commands(own):
            if main([*shlex.split(command), "--json", str(written)]) != 0:
                return 1
            (found,) = json.loads(written.read_text())
            lines.append(json.dumps({"command": f"ringlet {command}"} | found) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
