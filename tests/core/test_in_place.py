"""What a call may read and write of its tensors: in place, and nothing that it would overwrite before it is read. And
calls that differ between ranks in what few bits show."""

import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on
from refusals import refused
from ringlet import InvalidUsage


def memory(count: int) -> torch.Tensor:
    return ringlet.empty(count).copy_(torch.arange(count).remainder(97))


@on(3, "shared_memory", "threads", "tcp")
def test_lists_in_place(rank: int, world: int) -> None:
    for count in (4, 1000, 300_000):
        parts = list(memory(count * world).split(count))
        apart, block = [torch.empty(count) for _ in parts], torch.empty(count)
        ringlet.all_gather(apart, parts[rank].clone())
        ringlet.all_gather(parts, parts[rank])
        assert all(map(torch.equal, parts, apart))
        ringlet.reduce_scatter(block, [part.clone() for part in parts])
        ringlet.reduce_scatter(parts[rank], parts)
        assert torch.equal(parts[rank], block)
    buffer = memory(9)
    blocks = [buffer[:9], *(buffer[4:4] for _ in range(world - 1))]  # what is empty overlaps nothing
    ringlet.all_gather(blocks, blocks[rank])
    assert torch.equal(buffer, memory(9))


@on(2)
def test_what_would_be_overwritten_is_refused(rank: int, world: int) -> None:
    buffer = memory(40 * world)
    other = (rank + 1) % world
    block = slice(40 * other, 40 * (other + 1))
    parts = list(buffer.split(40))
    root_parts = parts if rank == 0 else None
    for call in (
        lambda: ringlet.all_reduce(buffer[:40], output=buffer[1:41]),
        lambda: ringlet.all_gather(buffer, buffer[block]),
        lambda: ringlet.all_gather(buffer, buffer[40 * rank + 1 :][:40] if other else buffer[40 * rank - 1 :][:40]),
        lambda: ringlet.reduce_scatter(buffer[block], buffer),
        lambda: ringlet.all_gather(parts, parts[other]),
        lambda: ringlet.reduce_scatter(parts[other], parts),
    ):
        refused("input and output partly overlap; for an in-place call", call)
    if rank == 0:
        refused("input and output partly overlap; for an in-place call", ringlet.scatter, parts[1], root_parts)
        refused("input and output partly overlap; for an in-place call", ringlet.gather, root_parts, parts[1])
    assert torch.equal(buffer, memory(40 * world))
    total = torch.ones(3)
    ringlet.all_reduce(total)  # the group goes on
    assert total.tolist() == [world] * 3


@on(2)
def test_autograd_is_told_what_was_written(rank: int, world: int) -> None:
    def raises(write, *, on: torch.Tensor, expected: bool = True) -> None:
        weight = torch.ones(on.shape, requires_grad=True)
        product = (weight * on).sum()  # saves `on`
        write()
        if expected:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        else:
            product.backward()

    x, whole, peer = torch.ones(4), torch.ones(4 * world), 1 - rank
    parts = list(whole.split(4))
    raises(lambda: ringlet.all_reduce(x), on=x)
    raises(lambda: ringlet.all_reduce(x, "max", timeout=5), on=x)
    raises(lambda: ringlet.ring_allreduce(x), on=x)
    raises(lambda: ringlet.all_reduce(x, async_op=True).wait(), on=x)
    raises(lambda: ringlet.broadcast(x), on=x, expected=rank != 0)
    raises(lambda: ringlet.all_gather(whole, x), on=whole)
    raises(lambda: ringlet.all_gather(whole, x), on=x, expected=False)
    raises(lambda: ringlet.all_gather(parts, x), on=parts[peer])
    raises(lambda: ringlet.recv(x, peer) if rank else ringlet.send(x, peer), on=x, expected=rank == 1)
    with torch.inference_mode():
        ringlet.all_reduce(torch.ones(3))


@on(2)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_broadcast_only_reads_at_its_root(rank: int, world: int, folder: str) -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    strided = torch.arange(6.0).view(2, 3).t()
    loss = (strided * weight).sum()
    ringlet.broadcast(strided, 0)
    assert (strided._version > 0) == (rank == 1)
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
    assert (values.sum().item(), expanded.sum().item()) == (66, 35)


@on(2, "shared_memory", "tcp")
def test_uneven_blocks_that_differ_between_ranks_are_refused(rank: int, world: int) -> None:
    counts = [(712, 1288), (786, 1214)][rank]  # 16 bits of a digest are the same
    blocks = [torch.full((count,), -1.0) for count in counts]
    refused("calls do not match", ringlet.all_gather, blocks, torch.full((counts[rank],), float(rank)))
    assert blocks[1 - rank].eq(-1.0).all()


@on(2)
def test_lengths_of_lists_are_not_taken_for_data(rank: int, world: int) -> None:
    given, taken = torch.arange(4) + 100 * rank, torch.full((4,), -1)
    with pytest.raises(InvalidUsage, match="calls do not match"):
        if rank == 0:
            ringlet.all_to_all(list(taken.split(2)), list(given.split(2)))
        else:
            ringlet.all_to_all(taken, given)
    assert taken.unique().tolist() == [-1]


@on(2)
def test_a_conjugated_gradient_is_resolved(rank: int, world: int) -> None:
    x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    y = x * (rank + 1)
    ringlet.all_reduce(y)
    (y.conj() * 1j).sum().real.backward()
    assert x.grad.tolist() == [2j * (rank + 1)] * 2


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


@on(3)
def test_lists_that_a_rank_does_not_need_are_left_alone(rank: int, world: int) -> None:
    """A gather's list at a rank that is not the root, and a scatter's."""
    ringlet.empty(64).fill_(77.0)  # freed at once: what the room for copies would find
    whole, parts = torch.full((4, 3), -1.0), torch.arange(12.0).view(4, 3)
    ringlet.gather(list(whole.unbind(1)), torch.full((4,), float(rank)), root=1)
    own = torch.zeros(4)
    ringlet.scatter(own, list(parts.unbind(1)), root=1)
    assert torch.equal(own, parts[:, rank])
    assert whole[0].tolist() == ([0, 1, 2] if rank == 1 else [-1] * 3)


@on(2)
@pytest.mark.parametrize("turn", range(5))
def test_threads_that_take_turns_do_not_keep_the_gil(rank: int, world: int, turn: int) -> None:
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
    assert [*first.unique().tolist(), *second.unique().tolist()] == [2, 2]
