"""The contract: every collective, algorithm, dtype, op, count and memory, on every transport, bit by bit.

One call to the pool runs many cases; what differs is collected and named, so that the ranks stay together to the end.
"""

from __future__ import annotations

import hashlib
import itertools
import random

import pytest
import torch

import ringlet
from cases import ALGORITHMS, LARGE, MEMORIES, MOVES, ONLY_IN_PLACE, Case, Checks, counts_of, placed, roots_of, run
from exact_data import DTYPES, OPS, supported
from ranks import on
from ringlet.schedule.collectives import BLOCKED, REDUCTIONS, ROOTED


@on("everyone")
@pytest.mark.parametrize("collective", REDUCTIONS + MOVES)
def test_every_dtype_and_op(rank: int, world: int, collective: str) -> None:
    """All pairs on a small and a large count; memory, place and root by lot, but for two ranks the algorithm too."""
    checks = Checks()
    lot = random.Random(5)  # the same on every rank
    pairs = [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if supported(dtype, op)]
    if collective in MOVES:
        pairs = [(dtype, "sum") for dtype in DTYPES]
    small, large = world + 1, counts_of(collective, world)[-1]
    for number, (dtype, op) in enumerate(pairs):
        names = ALGORITHMS[collective]
        chosen = names if world == 2 else [names[number % len(names)]]
        for count, algorithm in [(small, name) for name in names] + [(large, name) for name in chosen]:
            root = lot.choice(roots_of(collective, world))
            in_place = lot.choice((True, False)) and collective != "all_to_all"
            case = Case(collective, algorithm, dtype, op, count, lot.choice(MEMORIES), in_place, root)
            run(case, rank, world, checks)
    checks.conclude()


@on("everyone")
@pytest.mark.parametrize(
    "everyone",
    [("threads", 3), ("shared_memory", 5), ("tcp", 5), ("mixed", 3)],
    ids="{0[0]}-{0[1]}".format,
    indirect=True,
)
@pytest.mark.parametrize("collective", REDUCTIONS + MOVES)
def test_every_count_memory_place_and_root(rank: int, world: int, collective: str) -> None:
    """The C++ tests have every algorithm, count, place and root in more worlds; here are dtypes, averages and memories
    that differ between ranks, too."""
    checks = Checks()
    places = (True,) if collective in ONLY_IN_PLACE else (False,) if collective == "all_to_all" else (True, False)
    kinds = [(torch.float32, "sum"), (torch.bfloat16, "avg")] if collective in REDUCTIONS else [(torch.int32, "sum")]
    for algorithm in (*ALGORITHMS[collective], "auto"):
        for count, memory, in_place, root, (dtype, op) in itertools.product(
            counts_of(collective, world), MEMORIES, places, roots_of(collective, world), kinds
        ):
            run(Case(collective, algorithm, dtype, op, count, memory, in_place, root), rank, world, checks)
    checks.conclude()


def several_segments(rank: int, world: int, each_memory: bool) -> None:
    """A message of many segments, and one that leaves the caches (streaming stores)."""
    checks = Checks()
    memories = ("registered", "ordinary")
    for collective, names in ALGORITHMS.items():
        if collective == "barrier":
            continue
        count = 2_200_001 // (world if collective in BLOCKED else 1)
        for number, algorithm in enumerate(names):
            root = world - 1 if collective in ROOTED else 0
            for memory in memories if each_memory else (memories[number % 2],):
                run(Case(collective, algorithm, torch.float32, "sum", count, memory, False, root), rank, world, checks)
    checks.conclude()


@pytest.mark.parametrize(("transport", "world"), [("shared_memory", 3), ("threads", 2), ("tcp", 3), ("mixed", 3)])
def test_messages_of_many_segments(pool, transport, world):
    pool.values(several_segments, world, transport == "shared_memory", join=transport)


@on(3, "tcp", "mixed")
def test_more_segments_than_are_under_way(rank: int, world: int) -> None:
    """Where ranks need different amounts of scratch, they must still have as many segments under way."""
    for algorithm in ALGORITHMS["all_reduce"]:
        tensor = torch.full((17 << 20,), float(rank + 1))
        ringlet.all_reduce(tensor, algorithm=algorithm)
        assert bool((tensor == world * (world + 1) / 2).all()), algorithm


def random_bits(rank: int, world: int) -> dict[str, str]:
    """Digests of results of random floats, whose rounding shows any difference in order."""
    digests = {}
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64)
    generator = torch.Generator().manual_seed(rank)
    for dtype, count, memory in itertools.product(dtypes, (world + 1, LARGE // 3), ("registered", "ordinary")):
        values = torch.randn(count, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        for algorithm, op in itertools.product(ALGORITHMS["all_reduce"], ("sum", "avg")):
            result = ringlet.all_reduce(placed(values.to(dtype), memory, rank), op, algorithm=algorithm)
            data = result.contiguous().view(torch.uint8).numpy().tobytes()
            digests[f"{algorithm} {op} {dtype} {count} {memory}"] = hashlib.sha1(data).hexdigest()
    return digests


def test_all_ranks_get_the_same_bits(everyone):
    first, *others = everyone(random_bits)
    for rank, other in enumerate(others, start=1):
        assert [case for case in first if first[case] != other[case]] == [], f"rank {rank} differs from rank 0"


@on("everyone")
def test_unsupported_pairs_are_refused_before_anything_moves(rank: int, world: int) -> None:
    refused = 0
    for dtype, op in itertools.product(DTYPES, OPS):
        if supported(dtype, op):
            continue
        name = str(dtype).removeprefix("torch.")
        ones = torch.ones(4 * world, dtype=torch.uint8).to(dtype)
        blocks = ones.clone()
        block = torch.ones(4, dtype=torch.uint8).to(dtype)
        for act in (
            lambda x=blocks, op=op: ringlet.all_reduce(x, op),
            lambda x=blocks, y=block, op=op: ringlet.reduce_scatter(y, x, op),
            lambda x=blocks, op=op: ringlet.reduce(x, 0, op),
        ):
            with pytest.raises(ringlet.InvalidUsage, match=f"{op} is not defined for {name}"):
                act()
            refused += 1
        assert torch.equal(blocks.view(torch.uint8), ones.view(torch.uint8))
    assert refused == 3 * 35
    assert ringlet.all_reduce(torch.ones(3)).tolist() == [world] * 3, "the group works on"
