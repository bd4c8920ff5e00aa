"""The orders of summation: tables of docs/numerics.md, and the picture of docs/reveal.md.

What algorithms promise is what the prover finds in their schedules. What `ringlet reveal` saw is read from the file
that benchmarks/summation_orders.py writes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringlet.schedule import algorithms, draw_trees, schedule
from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.execution import execute
from ringlet.schedule.expression_trees import aligned

FILE = Path(__file__).parent.parent / "benchmarks" / "baselines" / "2026-11-27-summation-orders.jsonl"
BESIDE = ("ringlet reveal gloo -n 4", "python -m benchmarks reveal openmpi -n 4")  # the picture's
OWN = "ringlet:"
NAMES = {
    "gloo": "gloo of torch",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "benchmarks.peers.shm_kernels:deepspeed": "DeepSpeed",
    "benchmarks.peers.shm_kernels:vllm": "vLLM",
}

# What the prover looks at for the table of promises.
WORLDS = range(2, 17)
POWERS_OF_TWO = [2, 4, 8, 16]
TESTS = "../tests/"
# A column, of what the bits do not depend on, and the test that shows it.
SHOWN = [
    ("all ranks", "core/test_contract.py", "test_all_ranks_get_the_same_bits"),
    ("run, transport, memory, processor level", "core/test_one_digest.py", "test_every_place_gives_one_digest"),
    ("place in the message", "core/test_prove.py", "test_registered_schedules_are_proved"),
    ("hosts of the ranks", "core/test_reveal.py", "test_the_prover_and_the_probe_agree"),
    ("number of ranks", "core/test_one_digest.py", "test_every_place_gives_one_digest"),
]

Found = dict[str, Any]


def tables() -> dict[str, dict[str, list[list[str]]]]:
    """Page -> name of a table in it -> lines of cells."""
    found = _read()
    others = [one for one in found if not one["target"].startswith(OWN)]
    own = [one for one in found if one["target"].startswith(OWN)]
    revealed = {"revealed libraries": _libraries(others), "revealed algorithms": _algorithms(own)}
    return {"numerics.md": {"promises": _promises(), **revealed}}


def picture() -> str:
    """Two libraries side by side, as SVG."""
    return draw_trees.svg([one for command in BESIDE for one in _read() if one["command"] == command])


def _promises() -> list[list[str]]:
    """Of every algorithm, for whom a sum's bits are the same; a last line with the tests."""
    lines = [["collective", "algorithm", *(column for column, _, _ in SHOWN)]]
    moves: dict[str, list[str]] = {}
    for algorithm, collective, _ in algorithms():
        if collective not in REDUCTIONS:
            moves.setdefault(collective, []).append(f"`{algorithm}`")
            continue
        every = "yes" if collective == "all_reduce" else "one has a result"
        found = [_of_places(collective, algorithm), _of_hosts(collective, algorithm), _of_worlds(collective, algorithm)]
        lines.append([f"`{collective}`", f"`{algorithm}`", every, "yes", *found])
    for collective, names in moves.items():
        lines.append([f"`{collective}`", ", ".join(names), *["adds nothing: keeps all bits"] * len(SHOWN)])
    tests = [f"[{name}]({TESTS}{file})" for _, file, name in SHOWN]
    return [*lines, ["shown by", "", *tests]]


def _trees_of(collective: str, algorithm: str, world: int, root: int = 0, hosts: Sequence[int] | None = None) -> Any:
    """Of a result's chunks, in their order; one tree, if all chunks have it."""
    made = schedule(algorithm, collective, world=world, root=root, hosts=hosts)
    found = execute(made)
    chunks = {}
    for rank, (first, count) in enumerate(made.outputs):
        for chunk in range(first, first + count):
            value = found.values[rank][chunk]
            assert value is not None
            chunks[chunk] = found.trees.text(value[1])
    texts = [chunks[chunk] for chunk in sorted(chunks)]
    return texts[0] if len(set(texts)) == 1 else texts


def _of_places(collective: str, algorithm: str) -> str:
    return _worlds_in_words(w for w in WORLDS if isinstance(_trees_of(collective, algorithm, w), str))


def _of_worlds(collective: str, algorithm: str) -> str:
    """Where ranks add what the aligned tree of one world has: of reduce, whatever the root is."""

    def is_aligned(world: int) -> bool:
        roots = range(world if collective == "reduce" else 1)
        return all(_trees_of(collective, algorithm, world, root) == aligned(0, world) for root in roots)

    return "powers of two" if all(map(is_aligned, POWERS_OF_TWO)) else "no"


def _of_hosts(collective: str, algorithm: str) -> str:
    source = random.Random(1)
    in_order, others = [], []
    for world in (4, 6, 8, 12):
        in_order += [[2 * r // world for r in range(world)], [r // 2 for r in range(world)], list(range(world))]
        in_order += [[0] + [1] * (world - 1)]
        others += [[r % 2 for r in range(world)], *([source.randrange(3) for _ in range(world)] for _ in range(5))]

    def same(hosts: Sequence[int]) -> bool:
        numbers = list(dict.fromkeys(hosts))
        named = [numbers.index(host) for host in hosts]
        return bool(
            _trees_of(collective, algorithm, len(named)) == _trees_of(collective, algorithm, len(named), hosts=named)
        )

    if not all(map(same, in_order)):
        return "no"
    return "yes" if all(map(same, others)) else "host after host"


def _worlds_in_words(worlds: Iterable[int]) -> str:
    found = list(worlds)
    if found == list(WORLDS):
        return "yes"
    if found == POWERS_OF_TWO:
        return "powers of two"
    if len(found) > 1 and found == list(range(2, found[-1] + 1)):
        return f"up to {found[-1]} ranks"
    return f"{' or '.join(map(str, found))} ranks"


def _read() -> list[Found]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def _libraries(found: Sequence[Found]) -> list[list[str]]:
    lines = [["library", "command", "trees, from a number of elements on", "roundings", "all ranks' bits"]]
    for one in found:
        version = re.findall(r"\d[\w.]*", one["version"])[0]
        parts = [(1, one["messages"][0]["layouts"]), *((c["elements"], [c]) for c in one["changes"])]
        said = "; ".join(f"{elements:,}: {_trees(one, layouts)}" for elements, layouts in parts)
        depths = sorted({order["depth"] for order in one["orders"]})
        equal = "equal" if all(seen["ranks_equal"] for seen in one["messages"]) else "differ"
        roundings = f"{depths[0]} to {depths[-1]}" if len(depths) > 1 else f"{depths[0]}"
        lines.append([f"{NAMES[one['target']]} {version}", f"`{one['command']}`", said, roundings, equal])
    return lines


def _trees(one: Found, layouts: Sequence[dict[str, Any]]) -> str:
    """One tree as text; of several the number."""
    distinct = {order for layout in layouts for order in layout["orders"]}
    if len(layouts) > 1:
        return f"{len(distinct)} trees by rank"
    return f"{len(distinct)} trees by place" if len(distinct) > 1 else f"`{one['orders'][min(distinct)]['text']}`"


def _algorithms(found: Sequence[Found]) -> list[list[str]]:
    lines = [["algorithm", "collective", "float32", "bfloat16"]]
    for one in found:
        if one["dtype"] == "float32":
            same = [other for other in found if _call(other) == _call(one) and other["dtype"] == "bfloat16"]
            texts = [" ".join(f"`{order['text']}`" for order in each["orders"]) for each in (one, *same)]
            lines.append([f"`{one['target'].removeprefix(OWN)}`", f"`{one['collective']}`", *texts])
    return lines


def _call(one: Found) -> tuple[str, str]:
    return one["target"], one["collective"]
