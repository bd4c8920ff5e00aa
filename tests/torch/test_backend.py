"""torch.distributed on ringlet: what the other backends do there, with the same results."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on


@on((2, 3), "dist:ringlet")
def test_what_no_random_program_calls(rank: int, world: int) -> None:
    """test_random_backend_calls.py has the other calls, in all their forms."""
    total = sum(range(1, world + 1))
    for factor in (0.5, torch.tensor([0.25])):
        dist.all_reduce(scaled := torch.full((10,), 1.0 + rank), dist._make_nccl_premul_sum(factor))
        assert scaled.tolist() == [float(factor) * total] * 10
    rows, flat = torch.zeros(world, 2), torch.zeros(2 * world)
    for output in (rows, flat):
        dist.all_gather_into_tensor(output, torch.full((2,), float(rank)))
    assert rows[:, 1].tolist() == list(range(world)) and torch.equal(rows.flatten(), flat)
    dist.all_to_all_single(output := torch.empty(2 * world, 3), torch.arange(6.0 * world).view(-1, 3) + 100 * rank)
    assert output[:, 0].tolist() == [100 * q + 6 * rank + 3 * i for q in range(world) for i in range(2)]
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        dist.broadcast(tensor := torch.full((5,), float(rank)), world - 1, group=pair)
        assert tensor.tolist() == [world - 1.0] * 5, "the root is a rank of the world"
    dist.scatter(leaf := torch.zeros(3, requires_grad=True), list(torch.ones(world, 3)) if rank == 0 else None)
    assert leaf.tolist() == [1.0] * 3, "as gloo does"
    collected: list | None = [None] * world if rank == 0 else None
    dist.gather_object(rank * 2, collected, 0)
    assert collected == ([0, 2, 4][:world] if rank == 0 else None)


@on((2, 3), "dist:ringlet")
def test_handles(rank: int, world: int) -> None:
    tensors = [torch.full((1 + 1000 * i,), float(i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i in reversed(range(20)):
        assert works[i].wait() and works[i].is_completed()
        assert torch.equal(tensors[i], torch.full_like(tensors[i], float(i * world)))
    work = dist.all_reduce(torch.full((50_000,), 2.0), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().unique().tolist() == [4.0 * world]
    assert work.result()[0].unique().tolist() == [2.0 * world]
    first, second = (dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(2))
    after = first.get_future().then(lambda future: second.wait() and future.value()[0].sum() + second.result()[0].sum())
    assert after.wait().item() == 100_000 * world
    gathered = [torch.zeros(3) for _ in range(world)]
    value = dist.all_gather(gathered, torch.full((3,), float(rank)), async_op=True).get_future().wait()
    assert [tensor[0].item() for tensor in gathered] == list(range(world)) and len(value) > 0


@on((2, 3), "dist:ringlet")
def test_a_wait_has_its_own_timeout(rank: int, world: int, path: str) -> None:
    others = dist.FileStore(path, world)
    dist.barrier()
    if rank == world - 1:
        others.wait([f"done {q}" for q in range(world - 1)])
        return
    work = dist.all_reduce(torch.ones(10), async_op=True)
    with pytest.raises(ringlet.Timeout, match="not complete after 50 ms of waiting, and goes on"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed()
    group = dist.new_group(list(range(world - 1)), timeout=timedelta(seconds=20), use_local_synchronization=True)
    dist.barrier(group=group)  # another group is not harmed
    others.set(f"done {rank}", "")


def waits_in_vain(rank: int, world: int, path: str) -> str:
    """What a call raises for which the last rank does not come."""
    others = dist.FileStore(path, world)
    if rank == world - 1:
        others.wait([f"done {q}" for q in range(world - 1)])
        return ""
    with pytest.raises(ringlet.Timeout) as caught:
        dist.all_reduce(torch.ones(10))
    others.set(f"done {rank}", "")
    return str(caught.value)


@pytest.mark.parametrize("world", [2, 3])
def test_the_groups_timeout(pool, tmp_path, world):
    for limit in (0.5, 2.0, 8.0):  # the next one where the ranks do not meet in it
        outcomes = pool.run(waits_in_vain, world, str(tmp_path / f"{limit}"), join="dist:ringlet", timeout=limit)
        expected = rf"all_reduce #0 .*waited {limit:.1f} s for rank {world - 1}"
        if all(re.search(expected, one.value or "") for one in outcomes[:-1]):
            return
    pytest.fail("\n".join(map(str, outcomes)))


@on((2, 3), "dist:ringlet")
def test_the_algorithm_can_be_chosen(rank: int, world: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend) is ringlet._C.Backend and backend.algorithm == "auto"
    for name in ("ring", "butterfly", "auto"):
        backend.algorithm = name
        dist.all_reduce(tensor := torch.ones(1000))
        assert backend.algorithm == name and tensor.unique().tolist() == [world]
    with pytest.raises(ringlet.InvalidUsage, match=r'algorithm must be one of auto, .*, got "rings"'):
        backend.algorithm = "rings"
