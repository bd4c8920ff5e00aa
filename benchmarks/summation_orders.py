"""Reveals the summation orders of the libraries of docs/numerics.md, a JSON line each.

python -m benchmarks.summation_orders FILE.jsonl [MODULE:FUNCTION=VERSION ...]
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.__main__ import main

from ringlet.bench.cases import MPI_PEERS
from ringlet.schedule import algorithms
from ringlet.schedule.collectives import REDUCTIONS

LIBRARIES = ("gloo", *MPI_PEERS)
WORLDS = (3, 4, 8)


def commands(own: Iterable[str]) -> Iterator[str]:
    """Of other libraries in some worlds, and of ringlet's algorithms in one. A function's first call may build it."""
    for world in WORLDS:
        yield from (f"reveal {target} -n {world}" for target in LIBRARIES)
        yield from (f"reveal {target} -n {world} --timeout 900" for target in own)
    for algorithm, collective, _ in algorithms():
        if collective in REDUCTIONS:
            for dtype in ("float32", "bfloat16"):
                yield f"reveal ringlet:{algorithm} -n 4 --collective {collective} --dtype {dtype} --sizes 4K"


def run(file: Path, own: dict[str, str]) -> int:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        for command in commands(own):
            if main([*shlex.split(command), "--json", str(written)]) != 0:
                return 1
            (found,) = json.loads(written.read_text())
            found["version"] = own.get(found["target"], found["version"])
            program = "python -m benchmarks" if found["target"] in MPI_PEERS else "ringlet"
            lines.append(json.dumps({"command": f"{program} {command}"} | found) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])))
