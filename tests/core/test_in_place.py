"""Input and output in one memory: lists in place, and what would be overwritten before it is read."""

import pytest
import torch

import ringlet
from ranks import on


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
        with pytest.raises(ringlet.InvalidUsage, match="input and output partly overlap; for an in-place call"):
            call()
    if rank == 0:
        with pytest.raises(ringlet.InvalidUsage, match="input and output partly overlap; for an in-place call"):
            ringlet.scatter(parts[1], root_parts)
        with pytest.raises(ringlet.InvalidUsage, match="input and output partly overlap; for an in-place call"):
            ringlet.gather(root_parts, parts[1])
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
