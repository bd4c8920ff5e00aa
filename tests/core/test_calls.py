"""How calls are made, on every transport: arrays, shapes, messages, barriers. Many at once, and in groups of some
ranks, are in random programs (test_random_calls.py)."""

from __future__ import annotations

import itertools
import math
import pathlib
from datetime import timedelta

import numpy
import pytest
import torch

import ringlet
from cases import MEMORIES, Checks, finish, placed
from exact_data import input_of
from ranks import TRANSPORTS, on


@on("everyone")
def test_numpy_arrays(rank: int, world: int) -> None:
    for code, shape in itertools.product("dfeqihbB?FD", ((), (5,), (3, 7), (world, 2, 3))):
        array = numpy.ones(shape, dtype=code)
        ringlet.all_reduce(array)
        assert (array == numpy.full(shape, world, dtype=code)).all(), (code, shape)
    output = numpy.zeros((world, 4), dtype="int32")
    ringlet.all_gather(output, numpy.full(4, rank, dtype="int32"))
    assert output.tolist() == [[q] * 4 for q in range(world)]
    mixed = torch.zeros(4)
    ringlet.reduce_scatter(mixed, numpy.ones((world, 4), dtype="float32"))
    assert mixed.tolist() == [world] * 4


@on("everyone")
def test_wide_unsigned_integers_are_copied(rank: int, world: int) -> None:
    """Unsigned integers of more than a byte, as tensors and arrays, beyond what a signed one holds."""
    for code in ("uint16", "uint32", "uint64"):
        most = numpy.iinfo(code).max
        mine = numpy.full(3, most - rank, code)
        wanted = [[most - q] * 3 for q in range(world)]
        assert ringlet.all_gather(torch.zeros(world, 3, dtype=getattr(torch, code)), mine).tolist() == wanted
        assert ringlet.broadcast(torch.from_numpy(mine.copy()), world - 1).tolist() == wanted[-1]
        whole = ringlet.gather(numpy.zeros((world, 3), code) if rank == 0 else None, mine)
        assert rank != 0 or whole.tolist() == wanted
        part = ringlet.scatter(numpy.zeros(3, code), numpy.array(wanted, code) if rank == 0 else None)
        assert part.tolist() == wanted[rank]
        sent = numpy.repeat(mine[:1], world)
        assert ringlet.all_to_all(numpy.zeros(world, code), sent).tolist() == [row[0] for row in wanted]
        sending = ringlet.send(mine, (rank + 1) % world, async_op=True) if world > 1 else None
        if sending is not None:
            assert ringlet.recv(numpy.zeros(3, code), (rank - 1) % world).tolist() == wanted[rank - 1]
            sending.wait()


@on("everyone")
def test_a_label_for_torchs_calls_is_not_ringlets(rank: int, world: int) -> None:
    """Ranks whose tensors lie differently make the same call, whatever torch.distributed's calls are for just then."""
    ringlet._C.set_call_label(7)
    try:
        tensor = torch.ones(4, 6)[:, ::2] if rank == 0 else torch.ones(4, 3)
        assert ringlet.all_reduce(tensor).tolist() == [[world] * 3] * 4
    finally:
        ringlet._C.set_call_label(0)


@on("everyone")
def test_strided_tensors_and_arrays(rank: int, world: int) -> None:
    """What is not contiguous is copied: what lies between stays."""
    for async_op in (False, True):
        for tensor in (torch.zeros(3, 4), numpy.zeros((3, 4))):
            tensor[:] = rank + 1
            total = world * (world + 1) / 2
            finish(ringlet.all_reduce(tensor[:, ::2].T, async_op=async_op), async_op)
            assert tensor[:, ::2].tolist() == [[total] * 2] * 3 and tensor[:, 1::2].tolist() == [[rank + 1] * 2] * 3
            finish(ringlet.broadcast(tensor[:, 1], world - 1, async_op=async_op), async_op)
            assert tensor[:, 1].tolist() == [world] * 3 and tensor[:, 3].tolist() == [rank + 1] * 3
            finish(ringlet.reduce(tensor[:, 3], 0, async_op=async_op), async_op)
            assert tensor[:, 3].tolist() == [total if rank == 0 else rank + 1] * 3
            whole = numpy.zeros((3 * world, 2))
            source = torch.full((1,), float(rank), dtype=torch.float64).expand(3)
            finish(ringlet.all_gather(whole[:, 0], source, async_op=async_op), async_op)
            assert whole.tolist() == [[q, 0] for q in range(world) for _ in range(3)]
    columns = torch.ones(300, 2).t()
    for _ in range(3):
        ringlet.all_reduce(columns, async_op=True)  # the next one's input
    ringlet.all_reduce(columns)
    assert columns.unique().tolist() == [world**4]
    ringlet.gather(None if rank else torch.zeros(world, 2)[:, 0], torch.ones(1))
    assert ringlet.gather(torch.zeros(2, 2).t()[0] if rank else torch.zeros(world), torch.ones(1)) is not None


@on("everyone")
def test_timeouts_longer_than_a_clock(rank: int, world: int) -> None:
    for timeout in (math.inf, 1e30, 10**400, timedelta.max, numpy.float32(5), None, 1e-9 if world == 1 else 5):
        assert ringlet.all_reduce(torch.ones(2), timeout=timeout).tolist() == [world] * 2
        work = ringlet.all_reduce(torch.ones(2), async_op=True)
        work.wait(timeout if timeout != 1e-9 else 5)
    for wrong, says in ((math.nan, "got nan"), ("x", "got 'x'"), (-1, "from 0 on .*got -1")):
        with pytest.raises(ringlet.InvalidUsage, match=says):
            work.wait(wrong)
    work.wait(0)


@on((2, 3), *TRANSPORTS)
def test_messages(rank: int, world: int) -> None:
    """Around the ring, all sizes: none, less than a segment (128 KiB less its header), just one, several."""
    segment = (128 << 10) - 64
    sizes = [(size, torch.uint8) for size in (0, 1, 7, segment - 1, segment, segment + 1, 2 * segment, 1_000_003)]
    sizes += [(size, torch.float64) for size in (0, 7, segment // 8, 100_001)]
    right, left = (rank + 1) % world, (rank - 1) % world
    checks = Checks()
    for (size, dtype), memory in itertools.product(sizes, MEMORIES):
        mine = placed(input_of(dtype, "sum", world, rank, size), memory, rank)
        got = placed(torch.zeros(size, dtype=dtype), memory, left)
        receiving = ringlet.recv(got, left, async_op=True)
        ringlet.send(mine, right)
        receiving.wait()
        checks.equal((size, memory, dtype), got, input_of(dtype, "sum", world, left, size))
    checks.conclude()


@on("everyone")
def test_barrier(rank: int, world: int, folder: str) -> None:
    for number in range(20):
        pathlib.Path(folder, f"{number}-{rank}").touch()
        ringlet.barrier() if number % 2 else ringlet.barrier(async_op=True).wait()
        for other in range(world):
            assert pathlib.Path(folder, f"{number}-{other}").exists(), f"barrier {number} did not wait for {other}"


@on("everyone")
def test_shapes_and_offsets(rank: int, world: int) -> None:
    value = ringlet.all_reduce(torch.ones(2, 3, 4))
    assert value.shape == (2, 3, 4) and value.unique().item() == world
    assert ringlet.all_reduce(torch.tensor(2.5)).item() == 2.5 * world
    rows = ringlet.all_gather(torch.empty(world, 2, 2), torch.full((2, 2), float(rank)))
    assert rows[:, 0, 0].tolist() == list(range(world))
    assert ringlet.all_reduce(torch.ones(0, 5)).shape == (0, 5)
    columns = torch.arange(12.0).reshape(3, 4)[1]  # contiguous, at an offset
    assert ringlet.all_reduce(columns).tolist() == [4.0 * world, 5.0 * world, 6.0 * world, 7.0 * world]
    odd = torch.ones(4 * 999 + 1, dtype=torch.uint8)[1:].view(torch.uint8)  # not aligned to anything
    assert ringlet.all_reduce(odd).unique().item() == world


@on(3, "threads")
def test_threads_meet_again_under_the_same_name(rank: int, world: int, folder: str) -> None:
    for cycle in range(300):
        ringlet.finalize()
        ringlet.init(rank, world, transport="threads", name=folder, timeout=20)
        if cycle % 10 == 0:
            assert ringlet.all_reduce(torch.ones(1)).item() == world
