"""Random schedules, as nobody would write them: the prover finds them right, and every engine gives the bits that their
messages give. RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import emulated_gpu
import ringlet
from random_schedules import Place, Tree, Value, drafted, proved, varied
from ranks import TRANSPORTS
from ringlet import _C
from ringlet.schedule.collectives import DIVIDED, ROOTED
from ringlet.schedule.data import Schedule

SCHEDULES = 20 * int(os.environ.get("RINGLET_TEST_PROGRAMS", "1"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
COUNTS = (0, 1, 2, 5, 37, 5003, 200_003)


def ordered(tree: Tree) -> Tree:
    """Addition commutes: the first two terms in the order of their least ranks."""
    if isinstance(tree, int):
        return tree
    terms = [ordered(term) for term in tree]
    return (*sorted(terms[:2], key=least), *terms[2:])


def least(tree: Tree) -> int:
    return tree if isinstance(tree, int) else min(map(least, tree))


def test_the_prover_finds_what_they_compute():
    for seed in range(FIRST, FIRST + 5 * SCHEDULES):
        schedule, results = drafted(seed)
        for place, found in proved(schedule).items():
            made = results[place]
            assert (found.origin, ordered(found.tree)) == (made.origin, ordered(made.tree)), (seed, place)


DTYPES = (*[torch.float32] * 3, torch.float64, torch.int64, torch.int32, torch.uint8, torch.complex64)


@dataclass
class Case:
    """A call by a schedule: `sizes` are the elements of its chunks."""

    schedule: Schedule
    results: dict[Place, Value]
    sizes: list[int]
    inputs: list[list[torch.Tensor]]  # by rank and chunk of its input
    dtype: torch.dtype = torch.float32

    def joined(self, chunks: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.empty(0, dtype=self.dtype), *chunks])

    def given(self, rank: int) -> torch.Tensor:
        return self.joined(self.inputs[rank])

    def value(self, tree: Tree, chunk: int) -> torch.Tensor:
        if isinstance(tree, int):
            return self.inputs[tree][chunk - self.schedule.inputs[tree][0]]
        first, *others = (self.value(term, chunk) for term in tree)
        return sum(others, first)

    def expected(self, rank: int) -> torch.Tensor:
        first, chunks = self.schedule.outputs[rank]
        values = [self.results[rank, chunk] for chunk in range(first, first + chunks)]
        return self.joined(self.value(value.tree, value.origin) for value in values)


def case_of(lot: random.Random, schedule: Schedule, results: dict[Place, Value], count: int) -> Case:
    parts, generator, dtype = schedule.parts, torch.Generator().manual_seed(lot.randrange(1000)), lot.choice(DTYPES)
    length, longer = divmod(count, parts) if schedule.collective in DIVIDED else (count, 0)
    sizes = [length + (chunk < longer) for chunk in range(parts)]

    def numbers(size: int) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(size, dtype=dtype, generator=generator)
        return torch.randint(0, 100, (size,), dtype=dtype, generator=generator)

    chunks = [range(first, first + held) for first, held in schedule.inputs]
    return Case(schedule, results, sizes, [[numbers(sizes[c]) for c in own] for own in chunks], dtype)


def start(
    case: Case, rank: int, in_place: bool, placed: Callable[[torch.Tensor], torch.Tensor], **options: Any
) -> Callable[[], None]:
    """Makes or posts the call; returns what waits for it and checks its result."""
    collective, root = case.schedule.collective, case.schedule.root
    given, expected = case.given(rank), case.expected(rank)
    wanted = expected if len(expected) or collective != "reduce" else given  # who is not the root keeps its tensor
    if collective in DIVIDED:
        tensor = output = placed(given if len(given) else torch.full((sum(case.sizes),), 99, dtype=case.dtype))
        if collective == "all_reduce":
            output = tensor if in_place else placed(torch.full_like(given, 98))
            made = ringlet.all_reduce(tensor, output=output, **options)
        else:
            made = getattr(ringlet, collective)(tensor, root, **options)
    elif in_place and collective in ("all_gather", "reduce_scatter"):
        whole, size = placed(torch.full((sum(case.sizes),), 97, dtype=case.dtype)), case.sizes[0]
        mine = whole[rank * size : (rank + 1) * size]
        tensor, output = (mine, whole) if collective == "all_gather" else (whole, mine)
        tensor.copy_(given)
        made = getattr(ringlet, collective)(output, tensor, **options)
    else:
        tensor, output = placed(given), placed(torch.full_like(expected, 96))
        if collective in ROOTED:
            mine = (
                (output if rank == root or collective == "scatter" else None),
                tensor if case.schedule.inputs[rank][1] else None,
            )
            made = getattr(ringlet, collective)(*mine, root, **options)
        else:
            made = getattr(ringlet, collective)(output, tensor, **options)

    def finish() -> None:
        if options["async_op"]:
            made.wait()
        assert torch.equal(output.cpu(), wanted), "the result"
        if tensor.data_ptr() != output.data_ptr() and not in_place:
            assert torch.equal(tensor.cpu(), given), "the input"

    return finish


NAMES = 50  # so the same name means other schedules again and again
lock = threading.Lock()  # ranks may be threads of one process
defined: dict[str, tuple[int, int]] = {}  # seed and world of what a name means


def define(seed: int, schedule: Schedule) -> str:
    def rounds(rank: int, world: int) -> Iterator[Any]:
        return (list(round.steps) for round in schedule.ranks[rank])

    name, has_root = f"random_{seed % NAMES}", schedule.collective in ROOTED
    with lock:
        if defined.get(name) != (seed, schedule.world):
            defined[name] = seed, schedule.world
            parts = schedule.parts if schedule.collective in DIVIDED else None
            function = (lambda rank, world, root: rounds(rank, world)) if has_root else rounds
            ringlet.algorithm(schedule.collective, name=name, parts=parts)(function)
    return name


def in_memory(registered: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    make = ringlet.empty if registered else torch.empty
    return lambda data: make(len(data), dtype=data.dtype).copy_(data)


def run_schedules(rank: int, world: int, seeds: range, on_device: bool = False) -> None:
    """Each rank makes some of the calls at once and posts others, and waits for those in its own order."""
    refused: set[int] = set()
    under_way: list[tuple[str, Callable[[], None], int]] = []

    def finish(told: str, function: Callable[[], Any], seed: int) -> Any:
        try:
            return function()
        except ringlet.InvalidUsage as error:  # on all ranks
            assert "would wait in a circle" in str(error), (told, error)
            refused.add(seed)
        except Exception as error:
            raise AssertionError(told) from error

    for seed in seeds:
        schedule, results = varied(seed, world)
        name, lot, own = define(seed, schedule), random.Random(seed), random.Random(1000 * seed + rank)
        for count in lot.sample(COUNTS, 3):
            registered = own.random() < lot.choice((0, 0.5, 1))
            placed = (lambda data: data.to(emulated_gpu.DEVICE)) if on_device else in_memory(registered)
            in_place = lot.random() < 0.5
            for _ in range(2):
                case, posted = case_of(lot, schedule, results, count), own.random() < 0.5
                how = f"{count} of {case.dtype}, {in_place=}, {registered=}, {posted=}"
                told = f"program {seed}, {how}: {schedule.json()}"
                begin = functools.partial(start, case, rank, in_place, placed, algorithm=name, async_op=posted)
                check = finish(told, begin, seed)
                if check is not None:
                    under_way.append((told, check, seed))
                while len(under_way) > own.choice((0, 0, 3, 9)):
                    finish(*under_way.pop(own.randrange(len(under_way))))
    for one in under_way:
        finish(*one)
    assert len(refused) <= len(seeds) / 4  # few schedules have such a circle


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_they_run(pool, transport, world):
    pool.values(run_schedules, world, range(FIRST, FIRST + SCHEDULES), join=transport)


def run_on_device(rank: int, world: int, seeds: range) -> None:
    emulated_gpu.load()
    emulated_gpu.use_own_stream()
    try:
        run_schedules(rank, world, seeds, on_device=True)
    finally:
        emulated_gpu.use_default_stream()


@pytest.mark.skipif(_C.gpu_status()["state"] == "not built", reason="the build found no nvcc")
@pytest.mark.parametrize("way", emulated_gpu.WAYS, indirect=True)
def test_they_run_on_a_gpu(device_pool, way):
    device_pool.values(run_on_device, 3, range(FIRST, FIRST + SCHEDULES), join="threads")


def blocks_of(lot: random.Random, collective: str, world: int) -> list[list[torch.Tensor]]:
    """[rank][i]: a block of rank's for rank i, which has as many elements as the collective allows."""
    sizes = [[lot.choice((0, 1, 3, 17, 4001)) for _ in range(world)] for _ in range(world)]
    if collective == "reduce_scatter":
        sizes = [sizes[0]] * world
    generator = torch.Generator().manual_seed(lot.randrange(1000))
    blocks = [[torch.randn(size, generator=generator) for size in row] for row in sizes]
    return [[row[0]] * world for row in blocks] if collective == "all_gather" else blocks


def uneven(rank: int, world: int, seeds: range) -> None:
    """Lists of tensors of different sizes: right, or refused by all ranks before anything moves."""
    for seed in seeds:
        schedule, results = varied(seed, world)
        collective, name, lot = schedule.collective, define(seed, schedule), random.Random(seed)
        if collective not in ("all_gather", "reduce_scatter", "all_to_all"):
            continue
        for _ in range(3):
            blocks = blocks_of(lot, collective, world)
            expected = [blocks[q][rank] for q in range(world)]
            if collective == "reduce_scatter":
                expected = [Case(schedule, results, [], blocks).value(results[rank, rank].tree, rank)]
            outputs = [torch.full_like(one, -1.0) for one in expected]
            output: Any = outputs[0] if collective == "reduce_scatter" else outputs
            try:
                getattr(ringlet, collective)(
                    output, blocks[rank][0] if collective == "all_gather" else blocks[rank], algorithm=name
                )
            except ringlet.InvalidUsage as error:
                assert "circle" in str(error) or "places of other blocks" in str(error), (seed, error)
                expected = [torch.full_like(one, -1.0) for one in expected]
            assert all(map(torch.equal, outputs, expected)), seed


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_uneven_blocks(pool, transport):
    pool.values(uneven, 3, range(FIRST, FIRST + 3 * SCHEDULES), join=transport)
