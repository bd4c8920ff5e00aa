"""torch.distributed on ringlet: what the other backends do there, with the same results."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ringlet
from exact_data import BITWISE, difference
from ranks import free_ports, on

WORLDS = (2, 3)
COUNTS = (1, 1000, 200_000)


@pytest.fixture(params=WORLDS)
def everyone(request, pool):
    """Runs a function on all ranks of one world, on the backend; gives what they returned."""
    return lambda function, *args, join="dist:ringlet": pool.values(function, request.param, *args, join=join)


def integers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(1, 5, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(op: str, world: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    tensors = [integers(q, count, dtype) for q in range(world)]
    together = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = together(total, tensor)
    return total / world if op == "AVG" else total


def cases_of_ops():
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        for count in COUNTS:
            yield op, count, torch.int64 if op.lower() in BITWISE else torch.float64


def same(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert not (found := difference(got, wanted)), f"{what}: {found}"


def reductions(rank: int, world: int) -> None:
    for op, count, dtype in cases_of_ops():
        reduce_op, mine = getattr(dist.ReduceOp, op), integers(rank, count, dtype)
        wanted = reduced(op, world, count, dtype)
        tensor = mine.clone()
        dist.all_reduce(tensor, reduce_op)
        same(tensor, wanted, ("all_reduce", op, count))
        for root in range(world):
            tensor = mine.clone()
            dist.reduce(tensor, root, reduce_op)
            same(tensor, wanted if rank == root else mine, ("reduce", op, count, root))
        blocks, block = mine.repeat(world), torch.empty_like(mine)
        dist.reduce_scatter_tensor(block, blocks, reduce_op)
        same(block, wanted, ("reduce_scatter_tensor", op, count))
        block.zero_()
        dist.reduce_scatter(block, list(blocks.chunk(world)), reduce_op)
        same(block, wanted, ("reduce_scatter", op, count))
    scaled = torch.full((10,), 1.0 + rank)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [0.5 * sum(range(1, world + 1))] * 10
    scaled = torch.full((10,), 1.0 + rank)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor([0.25])))
    assert scaled.tolist() == [0.25 * sum(range(1, world + 1))] * 10


def moves(rank: int, world: int) -> None:
    for count in COUNTS:
        mine, all_of_them = integers(rank, count), [integers(q, count) for q in range(world)]
        for root in range(world):
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            same(tensor, all_of_them[root], ("broadcast", root))
            gathered = [torch.zeros(count) for _ in range(world)] if rank == root else None
            dist.gather(mine, gathered, root)
            for q, tensor in enumerate(gathered or []):
                same(tensor, all_of_them[q], ("gather", root, q))
            block = torch.zeros(count)
            dist.scatter(block, [x * (1 + root) for x in all_of_them] if rank == root else None, root)
            same(block, all_of_them[rank] * (1 + root), ("scatter", root))
        gathered = [torch.zeros(count) for _ in range(world)]
        dist.all_gather(gathered, mine)
        flat, rows = torch.zeros(world * count), torch.zeros(world, count)
        dist.all_gather_into_tensor(flat, mine)
        dist.all_gather_into_tensor(rows, mine)
        for q in range(world):
            same(gathered[q], all_of_them[q], ("all_gather", q))
            same(rows[q], all_of_them[q], ("all_gather_into_tensor", q))
        same(flat, torch.cat(all_of_them), "all_gather_into_tensor")
    shaped = [torch.zeros(2, 3) for _ in range(world)]
    dist.all_gather(shaped, torch.full((2, 3), float(rank)))
    assert [tensor.unique().item() for tensor in shaped] == list(range(world))
    dist.barrier()
    dist.barrier(async_op=True).wait()


def messages(rank: int, world: int) -> None:
    right, left = (rank + 1) % world, (rank - 1) % world
    for count in (0, *COUNTS):
        got = torch.zeros(count)
        works = [dist.isend(integers(rank, count), right), dist.irecv(got, left)]
        for work in works:
            work.wait()
        same(got, integers(left, count), ("isend and irecv", count))
    if rank == 0:
        dist.send(integers(7, 50_000), 1)
        dist.recv(got := torch.zeros(50_000), 1)
        same(got, integers(8, 50_000), "recv")
    elif rank == 1:
        dist.recv(got := torch.zeros(50_000), 0)
        dist.send(integers(8, 50_000), 0)
        same(got, integers(7, 50_000), "recv")
    operations = [
        dist.P2POp(dist.isend, integers(rank, 10), right),
        dist.P2POp(dist.irecv, got := torch.zeros(10), left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(got, integers(left, 10), "batch_isend_irecv")


def groups(rank: int, world: int) -> None:
    pair, everyone = dist.new_group([0, world - 1]), dist.new_group()
    if rank in (0, world - 1):
        tensor = torch.full((1000,), 1.0 + rank)
        dist.all_reduce(tensor, group=pair)
        assert tensor.unique().tolist() == [1.0 + world]
        dist.broadcast(tensor.fill_(float(rank)), world - 1, group=pair)
        assert tensor.unique().tolist() == [world - 1.0]
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=everyone)
    assert tensor.tolist() == [world] * 5
    dist.destroy_process_group(everyone)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world**2] * 5


def objects(rank: int, world: int) -> None:
    thing = {"rank": rank, "text": "x" * (100 * rank)}
    gathered: list = [None] * world
    dist.all_gather_object(gathered, thing)
    assert [other["rank"] for other in gathered] == list(range(world)) and len(gathered[-1]["text"]) == 100 * (
        world - 1
    )
    several = [thing, rank, None] if rank == 1 else [None, None, 5]
    dist.broadcast_object_list(several, 1)
    assert several == [{"rank": 1, "text": "x" * 100}, 1, None]
    collected: list | None = [None] * world if rank == 0 else None
    dist.gather_object(rank * 2, collected, 0)
    assert collected == ([0, 2, 4][:world] if rank == 0 else None)
    part: list = [None]
    dist.scatter_object_list(part, [f"for {q}" for q in range(world)] if rank == 0 else None, 0)
    assert part == [f"for {rank}"]


def handles(rank: int, world: int) -> None:
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


@on("everyone")
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


@pytest.mark.parametrize("function", [reductions, moves, messages, groups, objects, handles])
def test_backend(everyone, function):
    everyone(function)


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


def test_the_groups_timeout(everyone, tmp_path):
    for limit in (0.5, 2.0, 8.0):
        *said, last = everyone(group_timeout, str(tmp_path / f"others-{limit}"), limit, join="nothing")
        expected = rf"Timeout: .*all_reduce #0 .*waited {limit:.1f} s for rank {len(said)}"
        if all(re.search(expected, text) for text in said):
            assert last == ""
            return
    pytest.fail("\n".join([*said, last]))


def by_environment(rank: int, world: int, ports: list[int]) -> None:
    """As torchrun starts it; several times in one process, by both spellings."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    try:
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
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


def test_environment_and_both_names(everyone):
    everyone(by_environment, free_ports(3), join="nothing")


def again_on_one_store(rank: int, world: int, store: str) -> None:
    """Nothing of an earlier group is taken for the next one's, however fast a rank is."""
    shared = dist.FileStore(store, world)
    for cycle in range(15):
        dist.init_process_group("ringlet", store=dist.PrefixStore("same", shared), rank=rank, world_size=world)
        if cycle % 3 == 0:
            dist.all_reduce(tensor := torch.ones(10))
            assert tensor.tolist() == [world] * 10
        dist.destroy_process_group()
    for cycle in range(15):
        ringlet.init(rank, world, shared)
        if cycle % 3 == 0:
            assert ringlet.all_reduce(torch.ones(10)).tolist() == [world] * 10
        ringlet.finalize()


def test_again_and_again_on_one_store(everyone, tmp_path):
    everyone(again_on_one_store, str(tmp_path / "store"), join="nothing")


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


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("hook", ["none", "views", "all_reduce", "fp16"])
def test_data_parallel_training_equals_gloo(pool, world, hook):
    ours = pool.values(train, world, hook, join="dist:ringlet")
    theirs = pool.values(train, world, hook, join="dist:gloo")
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-2 if hook == "fp16" else 1e-5, abs=1e-4)
    assert all(weights[6:] == ours[0][6:] for weights in ours), "all ranks have the same weights"


@on("everyone")
def test_the_algorithm_can_be_chosen(rank: int, world: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend) is ringlet._C.Backend and backend.algorithm == "auto"
    for name in ("ring", "butterfly", "auto"):
        backend.algorithm = name
        dist.all_reduce(tensor := torch.ones(1000))
        assert backend.algorithm == name and tensor.unique().tolist() == [world]
    with pytest.raises(ringlet.InvalidUsage, match=r'algorithm must be one of auto, .*, got "rings"'):
        backend.algorithm = "rings"
