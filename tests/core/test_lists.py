"""Lists of tensors in place of one tensor with a block for each rank, equal and of different sizes."""

from __future__ import annotations

import itertools

import numpy
import torch

import ringlet
from cases import ALGORITHMS, Checks, finish, placed
from exact_data import input_of, result_of
from ranks import on
from refusals import refused

MEMORIES = ("registered", "ordinary", "mixed", "offset")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def uneven(world: int, scale: int, by: int = 0) -> list[int]:
    """Blocks of nothing among them."""
    return [scale * ((q + by) % 3) + (q + by) % 2 for q in range(world)]


def cut(whole: torch.Tensor, counts: list[int], memory: str, rank: int) -> list[torch.Tensor]:
    return [placed(part, memory, rank) for part in whole.split(counts)]


def blank(counts: list[int], dtype: torch.dtype, memory: str, rank: int) -> list[torch.Tensor]:
    return [placed(torch.ones(count).to(dtype), memory, rank) for count in counts]


def cases(collective: str):
    """Every algorithm; the other dimensions in turns."""
    others = itertools.cycle(itertools.product(MEMORIES, DTYPES, (False, True)))
    for scale in (0, 1, 1500, 60_000):
        for algorithm in (*ALGORITHMS[collective], "auto"):
            yield scale, algorithm, *next(others)


@on("everyone")
def test_gathers(rank: int, world: int) -> None:
    checks = Checks()
    for case in cases("all_gather"):
        scale, algorithm, memory, dtype, async_op = case
        counts = uneven(world, scale)
        wanted = [input_of(dtype, "sum", world, q, counts[q]) for q in range(world)]
        outputs = blank(counts, dtype, memory, rank)
        mine = outputs[rank] if scale == 1 else placed(wanted[rank], memory, rank)
        mine.copy_(wanted[rank])
        finish(ringlet.all_gather(outputs, mine, algorithm=algorithm, async_op=async_op), async_op)
        for q in range(world):
            checks.equal((case, q), outputs[q], wanted[q])
        equal, root = blank([scale] * world, dtype, memory, rank), scale % world
        mine = placed(input_of(dtype, "sum", world, rank, scale), memory, rank)
        ringlet.gather(equal if rank == root else None, mine, root)
        if rank == root:
            for q in range(world):
                checks.equal((case, "gather", q), equal[q], input_of(dtype, "sum", world, q, scale))
    checks.conclude()


@on("everyone")
def test_reductions(rank: int, world: int) -> None:
    checks = Checks()
    for case in cases("reduce_scatter"):
        scale, algorithm, memory, dtype, async_op = case
        counts = tuple(uneven(world, scale))
        op = "max" if dtype != torch.bool and scale > 1 else "sum"
        inputs = cut(input_of(dtype, op, world, rank, sum(counts)), list(counts), memory, rank)
        before = [block.clone() for block in inputs]
        output = placed(torch.ones(counts[rank]).to(dtype), memory, rank)
        finish(ringlet.reduce_scatter(output, inputs, op, algorithm=algorithm, async_op=async_op), async_op)
        checks.equal(case, output, result_of(dtype, op, world, sum(counts)).split(counts)[rank])
        for block, was in zip(inputs, before, strict=True):
            checks.equal((case, "input"), block, was)
        equal, root = input_of(dtype, "sum", world, scale % world, scale * world), scale % world
        output = placed(torch.ones(scale).to(dtype), memory, rank)
        parts = tuple(cut(equal, [scale] * world, memory, rank)) if rank == root else None
        ringlet.scatter(output, parts, root)
        checks.equal((case, "scatter"), output, equal[rank * scale : (rank + 1) * scale])
    checks.conclude()


@on("everyone")
def test_exchanges(rank: int, world: int) -> None:
    """Every pair of ranks has a size of its own."""
    checks = Checks()
    for case in cases("all_to_all"):
        scale, algorithm, memory, dtype, async_op = case
        table = [uneven(world, scale, by=2 * i) for i in range(world)]
        sent = [input_of(dtype, "sum", world, i, sum(table[i])).split(table[i]) for i in range(world)]
        inputs = [placed(block, memory, rank) for block in sent[rank]]
        outputs = blank([row[rank] for row in table], dtype, memory, rank)
        finish(ringlet.all_to_all(outputs, inputs, algorithm=algorithm, async_op=async_op), async_op)
        for q in range(world):
            checks.equal((case, q), outputs[q], sent[q][rank])
    checks.conclude()


@on((2, 3), "shared_memory", "threads", "tcp")
def test_overlaps(rank: int, world: int) -> None:
    """Whichever block came last would stand there."""
    flat, block = torch.zeros(5 * world), torch.ones(5)
    matrix = flat.view(5, world)
    shifted = [flat[4 * q : 4 * q + 5] for q in range(world)]  # each begins with the last element of the one before
    crossed = [*(torch.empty(5) for _ in range(world - 2)), matrix[:, 0], matrix[:1].expand(5, world)[:, 0]]
    rows = [*(torch.empty(world) for _ in range(world - 2)), matrix[0], matrix[:, 0][:world]]
    for call in (
        lambda: ringlet.all_gather([block] * world, torch.ones(5)),
        lambda: ringlet.all_gather(shifted, block),
        lambda: ringlet.all_gather(crossed, block),
        lambda: ringlet.all_gather(rows, torch.ones(world)),
        lambda: ringlet.all_gather([matrix[:, 0]] * world, block),
        lambda: ringlet.gather(shifted, block, rank),
        lambda: ringlet.all_to_all(shifted, [block] * world, async_op=True),
    ):
        refused(r"output tensors must not overlap|share memory", call)
    ringlet.barrier()


@on((2, 3), "shared_memory", "threads", "tcp")
def test_layouts(rank: int, world: int) -> None:
    """Columns, blocks of columns, every second row and transposed blocks, which lie between one another."""
    for make in (
        lambda: torch.zeros(3, 2 * world).chunk(world, dim=1),
        lambda: torch.zeros(3, world, 2).unbind(1),
        lambda: torch.zeros(2 * world, 3).view(2, world, 3).unbind(1),
        lambda: torch.zeros(world, 2, 3).transpose(1, 2).unbind(0),
    ):
        blocks, wanted = list(make()), list(make())
        for q, block in enumerate(wanted):
            block.copy_(torch.arange(block.numel()).view(block.shape) + 100 * q)
        for async_op in (False, True):
            finish(ringlet.all_gather(blocks, wanted[rank], async_op=async_op), async_op)
            assert all(map(torch.equal, blocks, wanted))
            exchanged = list(make())
            finish(ringlet.all_to_all(exchanged, [wanted[rank]] * world, async_op=async_op), async_op)
            assert all(map(torch.equal, exchanged, wanted))
            mine = make()[0]
            finish(ringlet.reduce_scatter(mine, wanted, async_op=async_op), async_op)
            assert torch.equal(mine, world * wanted[rank])
            for block in blocks:
                block.zero_()


@on("everyone")
def test_groups_and_arrays(rank: int, world: int) -> None:
    group = ringlet.new_group(list(reversed(range(world))))
    blocks = [numpy.zeros((q + 1, 2), numpy.float32) for q in range(world)]
    got = ringlet.all_gather(blocks, numpy.full((group.rank + 1, 2), float(rank), numpy.float32), group=group)
    assert [block.tolist() for block in blocks] == [[[float(world - 1 - q)] * 2] * (q + 1) for q in range(world)]
    assert all(torch.is_tensor(one) and one.shape == (q + 1, 2) for q, one in enumerate(got))
    mean = torch.zeros(3)
    ringlet.reduce_scatter(mean, [torch.full((3,), rank + 2.0 * q) for q in range(world)], "avg")
    assert mean.tolist() == [(world - 1) / 2 + 2.0 * rank] * 3
    group.close()


@on((2, 3))
def test_refusals(rank: int, world: int) -> None:
    one, several = torch.zeros(4), [torch.zeros(4) for _ in range(world)]
    calls = {
        f"all_gather: a list must have one entry for each of the {world} ranks, got {world + 1}": lambda: (
            ringlet.all_gather([*several, one], one)
        ),
        rf"this rank's tensor must have as many elements as tensor {rank} of the list \(4\), got 5": lambda: (
            ringlet.all_gather(several, torch.zeros(5))
        ),
        f"each rank must pass one tensor, got {world}": lambda: ringlet.reduce_scatter(several, several),
        "all tensors must have the same number of elements": lambda: ringlet.gather(
            [torch.zeros(q) for q in range(world)], one, rank
        ),
        f"all_to_all: a list must have one entry for each of the {world} ranks, got 1": lambda: ringlet.all_to_all(
            one, several
        ),
        "broadcast: input and output must be tensors, got a list": lambda: ringlet.broadcast(several),
        "reduce: input and output must be tensors, got a list": lambda: ringlet.reduce(several),
        f"a list must have one entry for each of the {world} ranks, got 0": lambda: ringlet.all_gather([], one),
        "each rank must pass one tensor, got 0": lambda: ringlet.all_gather(several, None),
    }
    for said, call in calls.items():
        refused(said, call)
    ringlet.barrier()
