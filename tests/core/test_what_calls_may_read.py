"""What a call may read and write of its tensors, and calls that differ between ranks in what few bits show."""

from __future__ import annotations

import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on
from ringlet import InvalidUsage


def root_is_only_read(rank: int, world: int, folder: str) -> list[object]:
    weight = torch.ones(3, 2, requires_grad=True)
    strided = torch.arange(6.0).view(2, 3).t()
    loss = (strided * weight).sum()
    ringlet.broadcast(strided, 0)
    seen: list[object] = [strided._version > 0]
    if rank == 0:
        loss.backward()  # autograd refuses where the tensor has been written
        path = f"{folder}/values"
        numpy.arange(12, dtype=numpy.float32).reshape(3, 4).tofile(path)
        values = torch.from_numpy(numpy.memmap(path, dtype=numpy.float32, mode="r", shape=(3, 4))).t()
    else:
        values = torch.zeros(3, 4).t()
    ringlet.broadcast(values, 0)
    expanded = torch.tensor([7.0]).expand(5) if rank == 0 else torch.zeros(5)
    ringlet.broadcast(expanded, 0)
    return [*seen, values.sum().item(), expanded.sum().item()]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_broadcast_only_reads_at_its_root(pool, tmp_path):
    assert pool.values(root_is_only_read, 2, str(tmp_path)) == [[False, 66.0, 35.0], [True, 66.0, 35.0]]


@on(2)
def test_uneven_blocks_that_differ_between_ranks_are_refused(rank: int, world: int) -> None:
    counts = [(712, 1288), (786, 1214)][rank]  # 16 bits of a digest are the same
    blocks = [torch.full((count,), -1.0) for count in counts]
    with pytest.raises(InvalidUsage, match="calls do not match") as refused:
        ringlet.all_gather(blocks, torch.full((counts[rank],), float(rank)))
    assert blocks[1 - rank].eq(-1.0).all()
    assert type(refused.value).__name__ == "InvalidUsage"


@on(2)
def test_lengths_of_lists_are_not_taken_for_data(rank: int, world: int) -> None:
    given, taken = torch.arange(4) + 100 * rank, torch.full((4,), -1)
    with pytest.raises(InvalidUsage, match="calls do not match"):
        if rank == 0:
            ringlet.all_to_all(list(taken.split(2)), list(given.split(2)))
        else:
            ringlet.all_to_all(taken, given)
    assert taken.unique().tolist() == [-1]


def conjugated(rank: int, world: int) -> list[complex]:
    x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    y = x * (rank + 1)
    ringlet.all_reduce(y)
    (y.conj() * 1j).sum().real.backward()
    return x.grad.tolist()


def test_a_conjugated_gradient_is_resolved(pool):
    found = pool.values(conjugated, 2)
    assert found == [[grad * (rank + 1)] * 2 for rank, grad in enumerate([2j, 2j])]


@on("two")
def test_coalesced_calls_do_not_write_what_later_ones_read(rank: int, world: int) -> None:
    first, second = torch.full((4,), 1.0), torch.full((4,), 10.0)
    with pytest.raises(InvalidUsage, match="must not overlap the input of a later one"), dist._coalescing_manager():
        dist.reduce_scatter_tensor(second[:2], first)
        dist.reduce_scatter_tensor(torch.empty(2), second)
    assert second.unique().tolist() == [10.0]


@on(1, "dist:ringlet")
def test_results_are_delivered_in_the_calls_turn(rank: int, world: int) -> None:
    """An asynchronous call on a strided tensor, and another on the same tensor as it ends."""
    twice = dist._make_nccl_premul_sum(2.0)
    x = torch.ones(600, 600).t()[:, :599]
    began = time.perf_counter()
    dist.all_reduce(x, async_op=True).wait()
    whole = time.perf_counter() - began
    wrong = 0
    for turn in range(60):
        x.fill_(1.0)
        handle = dist.all_reduce(x, async_op=True)
        time.sleep(whole * turn / 40)
        dist.all_reduce(x, op=twice)
        handle.wait()
        wrong += x.unique().tolist() != [2.0]
    assert wrong == 0


def lists_of_others(rank: int, world: int) -> list[float]:
    """A gather's list at a rank that is not the root, and a scatter's."""
    ringlet.empty(64).fill_(77.0)  # freed at once: what the room for copies would find
    whole, parts = torch.full((4, 3), -1.0), torch.arange(12.0).view(4, 3)
    ringlet.gather(list(whole.unbind(1)), torch.full((4,), float(rank)), root=1)
    own = torch.zeros(4)
    ringlet.scatter(own, list(parts.unbind(1)), root=1)
    assert torch.equal(own, parts[:, rank])
    return whole[0].tolist()


def test_lists_that_a_rank_does_not_need_are_left_alone(pool):
    assert pool.values(lists_of_others, 3) == [[-1.0] * 3, [0.0, 1.0, 2.0], [-1.0] * 3]


def two_threads(rank: int, world: int) -> list[float]:
    """The first waits for the other rank in a small call, without the GIL, and needs it to come back."""
    first, second = torch.ones(4), torch.ones(4)
    ringlet.barrier()
    if rank == 0:
        thread = threading.Thread(target=lambda: ringlet.all_reduce(first))
        thread.start()
        time.sleep(0.01)
        ringlet.all_reduce(second, async_op=True).wait()
        thread.join()
    else:
        time.sleep(0.02)  # less than the time for which two threads take turns
        ringlet.all_reduce(first)
        ringlet.all_reduce(second)
    return [*first.unique().tolist(), *second.unique().tolist()]


def test_threads_that_take_turns_do_not_keep_the_gil(pool):
    for _ in range(5):
        assert pool.values(two_threads, 2) == [[2.0, 2.0]] * 2
