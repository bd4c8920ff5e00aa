"""torch.distributed on ringlet: what the other backends do there, with the same results."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ringlet
from ranks import free_ports, on


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
    with pytest.raises(ringlet.InvalidUsage, match="elements of an output tensor share memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(ringlet.InvalidUsage, match="band is not defined for float32"):
        dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND)
    with pytest.raises((ringlet.InvalidUsage, ValueError)):
        dist.all_gather([torch.zeros(3)] * (world + 1), torch.zeros(3))
    dist.all_reduce(tensors[0])


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


def group_timeout(rank: int, world: int, store: str, limit: float) -> str:
    """What a call raises for which the last rank does not come; or what init raises, if meeting takes longer."""
    own, others = dist.FileStore(f"{store}-own", world), dist.FileStore(store, world)
    said = ""
    try:
        dist.init_process_group("ringlet", store=own, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        if rank < world - 1:
            dist.all_reduce(torch.ones(10))
    except ringlet.Error as error:
        said = f"{type(error).__name__}: {error}"
    others.set(f"done {rank}", "")
    others.wait([f"done {q}" for q in range(world)])
    if dist.is_initialized():
        dist.destroy_process_group()
    return said


@pytest.mark.parametrize("world", [2, 3])
def test_the_groups_timeout(pool, tmp_path, world):
    for limit in (0.5, 2.0, 8.0):
        *said, last = pool.values(group_timeout, world, str(tmp_path / f"others-{limit}"), limit, join="nothing")
        expected = rf"Timeout: .*all_reduce #0 .*waited {limit:.1f} s for rank {len(said)}"
        if all(re.search(expected, text) for text in said):
            assert last == ""
            return
    pytest.fail("\n".join([*said, last]))


def by_environment(rank: int, world: int, ports: list[int]) -> None:
    """As torchrun starts it; several times in one process, by both spellings."""
    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1"):
        for backend, port in zip(("ringlet", "cpu:ringlet", "ringlet"), ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            dist.init_process_group(backend)
            assert "ringlet" in dist.get_backend()
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
            assert tensor.unique().tolist() == [world]
            dist.all_reduce(tensor, async_op=True).wait()
            dist.destroy_process_group()
            assert not dist.is_initialized()


@pytest.mark.parametrize("world", [2, 3])
def test_environment_and_both_names(pool, world):
    pool.values(by_environment, world, free_ports(3), join="nothing")


@on((2, 3), "nothing")
def test_again_and_again_on_one_store(rank: int, world: int, path: str) -> None:
    """Nothing of an earlier group is taken for the next one's, however fast a rank is."""
    shared = dist.FileStore(path, world)
    for cycle in range(15):
        dist.init_process_group("ringlet", store=dist.PrefixStore("same", shared), rank=rank, world_size=world)
        if cycle % 3 == 0:
            dist.all_reduce(tensor := torch.ones(10))
            assert tensor.tolist() == [world] * 10
        dist.destroy_process_group()


# --- DistributedDataParallel ----------------------------------------------------------------------------------------


def train(rank: int, world: int, hook: str) -> list[float]:
    """Losses of a few steps, with buckets of a few KiB."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=hook == "views")
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "all_reduce":
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for step in range(6):
        inputs, targets = (torch.randn(16, size, generator=generator) for size in (32, 8))
        optimizer.zero_grad()
        if step == 2:
            with parallel.no_sync():
                nn.functional.mse_loss(parallel(inputs), targets).backward()
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    return [*losses, *weights]


@pytest.mark.parametrize(("hook", "world"), [("none", 3), ("views", 2), ("all_reduce", 2), ("fp16", 2)])
def test_data_parallel_training_equals_gloo(pool, world, hook):
    ours = pool.values(train, world, hook, join="dist:ringlet")
    theirs = pool.values(train, world, hook, join="dist:gloo")
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-2 if hook == "fp16" else 1e-5, abs=1e-4)
    assert all(weights[6:] == ours[0][6:] for weights in ours), "all ranks have the same weights"


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
