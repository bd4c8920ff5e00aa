"""What stands on torch.distributed runs on ringlet as it does on gloo: rank functions that train or run, and return
numbers to compare.

Inputs are the same whatever the backend; models are small, and wide enough for several buckets and shards.
"""

from __future__ import annotations

import os
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH, STEPS = 24, 6, 8, 4


def network() -> nn.Sequential:
    """The same weights on every rank; 42 outputs do not divide by every world."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 42), nn.ReLU(), nn.Linear(42, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        inputs, targets = (torch.randn(BATCH, size, generator=generator) for size in (WIDTH, CLASSES))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sums(tensors: list[torch.Tensor]) -> list[float]:
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.detach().double().abs().sum().item() for tensor in whole]


def sharded(mesh: DeviceMesh | None = None, **settings: object) -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


# --- data parallel


def fsdp(rank: int, world: int, precision: str) -> list[float]:
    """fully_shard: all_gather_into_tensor forward, reduce_scatter_tensor (avg) backward, in uneven shards."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    model = sharded(init_device_mesh("cpu", (world,)), mp_policy=policy)
    model.set_gradient_divide_factor(2.0 * world) if precision == "divided" else None
    losses = train(model, torch.optim.Adam(model.parameters(), lr=0.01), 100 + rank)
    return [*losses, *sums(list(model.parameters()))]


def hybrid_fsdp(rank: int, world: int) -> list[float]:
    """Shards within rows of a mesh, replicas across: all-reduce on one dimension's groups, the rest on the other's."""
    model = sharded(init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")))
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.05), 100 + rank)
    return [*losses, *sums(list(model.parameters()))]


def compress_to_bf16(state, bucket):
    """torch's hook, whose name DDP refuses on every backend but NCCL. DDP also reads annotations: text is refused."""
    return default_hooks.bf16_compress_hook(state, bucket)


def data_parallel(rank: int, world: int, hook: str) -> list[float]:
    model = network()
    # PowerSGD's callbacks wait for calls that they make: with several buckets they take all of gloo's threads.
    buckets = {} if hook == "power_sgd" else {"bucket_cap_mb": 0.002}
    parallel = DistributedDataParallel(
        model, static_graph=hook == "static graph", gradient_as_bucket_view=hook == "views", **buckets
    )
    if hook in ("bf16", "fp16"):
        parallel.register_comm_hook(None, compress_to_bf16 if hook == "bf16" else default_hooks.fp16_compress_hook)
    elif hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(parallel, torch.optim.SGD(parallel.parameters(), lr=0.05), 100 + rank)
    return [*losses, *sums(list(model.parameters()))]


def zero_optimizer(rank: int, world: int) -> list[float]:
    """Each rank owns a part of Adam's state; updated parameters are broadcast by their owners."""
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    losses = train(parallel, optimizer, 100 + rank)
    optimizer.consolidate_state_dict(to=0)
    entries = len(optimizer.state_dict()["state"]) if rank == 0 else 0
    return [*losses, *sums(list(model.parameters())), float(entries)]


# --- tensor parallel


def tensor_parallel(rank: int, world: int) -> list[float]:
    """Columns, then rows: an all-reduce a block; inputs are the same on all ranks."""
    mesh = init_device_mesh("cpu", (world,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.05), 7)
    return [*losses, *sums(list(model.parameters()))]


def placements(rank: int, world: int) -> list[float]:
    """A DTensor goes from each placement to each other: all-gather, all-to-all, reduce-scatter, all-reduce."""
    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(7 * 10, dtype=torch.float64).reshape(7, 10)  # 7 rows: uneven shards
    rows = distribute_tensor(values, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    whole = columns.redistribute(mesh, [Replicate()])
    assert torch.equal(whole.to_local(), values)
    assert torch.equal(columns.to_local(), values.chunk(world, 1)[rank])
    product = rows.t() @ rows  # a partial sum on each rank
    assert torch.equal(product.full_tensor(), values.t() @ values)
    assert torch.equal(product.redistribute(mesh, [Shard(0)]).full_tensor(), values.t() @ values)
    return sums([rows, columns, whole, product])


# --- compiled


def compiled(rank: int, world: int, backend: str, folder: str) -> list[float]:
    """Functional collectives inside one compiled graph: no break, the same results as without."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", group)
        everyone = functional.all_gather_tensor(total + rank, 0, group)
        part = functional.reduce_scatter_tensor(everyone.cos(), "sum", 0, group)
        return functional.all_to_all_single(part.reshape(-1), None, None, group) + total.reshape(-1)

    torch._dynamo.reset()
    fast = torch.compile(step, backend=backend, fullgraph=True)
    x = torch.arange(4.0 * world).reshape(2 * world, 2) + rank
    assert torch.allclose(fast(x), step(x))
    return sums([fast(x), fast(x + 1)])


def compiled_data_parallel(rank: int, world: int) -> list[float]:
    model = network()
    parallel = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    losses = train(parallel, torch.optim.SGD(model.parameters(), lr=0.05), 100 + rank)
    return [*losses, *sums(list(model.parameters()))]


# --- saved, and meshes


def saved_and_loaded(rank: int, world: int, folder: str) -> list[float]:
    """torch.distributed.checkpoint of a sharded model and its optimizer, into a model in another state."""
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 100 + rank)
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dist.barrier()
    assert (pathlib.Path(folder) / ".metadata").exists()

    other = sharded()
    beside = torch.optim.Adam(other.parameters(), lr=0.5)
    train(other, beside, 900 + rank)
    empty_weights, empty_states = get_state_dict(other, beside)
    loaded = {"model": empty_weights, "optimizer": empty_states}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(other, beside, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert sums(list(other.parameters())) == sums(list(model.parameters()))
    # The same steps from the same state are the same.
    assert train(other, beside, 55 + rank) == train(model, optimizer, 55 + rank)
    return sums(list(other.parameters()))


def meshes(rank: int, world: int) -> list[float]:
    """A row's and a column's groups, their slices, and the whole again."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("row", "column"))
    found = []
    for name in ("row", "column"):
        tensor = torch.full((1000,), 1.0 + rank)
        dist.all_reduce(tensor, group=mesh[name].get_group())
        found.append(tensor.unique().item())
        gathered: list = [None] * mesh[name].size()
        dist.all_gather_object(gathered, rank, group=mesh.get_group(name))
        found.append(float(sum(gathered)))
    flat = mesh["row", "column"]._flatten("all")
    tensor = torch.full((3,), 1.0 + rank)
    dist.all_reduce(tensor, group=flat.get_group())
    return [*found, *tensor.tolist(), float(mesh.get_local_rank("row")), float(mesh.get_local_rank("column"))]


def in_debug_mode(rank: int, world: int, store: str, name: str, *args: str) -> list[float]:
    """One of the functions above under TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares every call among ranks first."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("ringlet", store=dist.FileStore(store, world), rank=rank, world_size=world)
        assert "Wrapper" in type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        return globals()[name](rank, world, *args)
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)


# --- on both backends


TOLERANCE = {"rel": 1e-6, "abs": 1e-6}  # of fp32 sums in another order
TOLERANCE_OF_BF16 = {"rel": 2e-2, "abs": 2e-2}  # gloo rounds every addition, ringlet once


def agree(pool, function, world, *args, tolerance=TOLERANCE, **places):
    """Runs a function on both backends; every rank's numbers must agree. places: arguments that differ (folders)."""
    ours, theirs = (
        pool.values(
            function, world, *args, *(str(place / backend) for place in places.values()), join=f"dist:{backend}"
        )
        for backend in ("ringlet", "gloo")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert len(one) > 0 and one == pytest.approx(other, **tolerance)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fully_sharded_training(pool, world, precision):
    agree(pool, fsdp, world, precision, tolerance=TOLERANCE_OF_BF16 if precision == "bf16" else TOLERANCE)


def test_fully_sharded_on_a_mesh_of_two_dimensions(pool):
    agree(pool, hybrid_fsdp, 4)


@pytest.mark.parametrize("hook", ["none", "views", "static graph", "bf16", "fp16", "power_sgd"])
def test_data_parallel_training(pool, hook):
    agree(pool, data_parallel, 2, hook, tolerance=TOLERANCE_OF_BF16 if hook.endswith("16") else TOLERANCE)


def test_zero_redundancy_optimizer(pool):
    agree(pool, zero_optimizer, 2)


def test_tensor_parallel_training(pool):
    agree(pool, tensor_parallel, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_placements_of_a_distributed_tensor(pool, world):
    agree(pool, placements, world)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functional_collectives(pool, tmp_path, backend):
    agree(pool, compiled, 2, backend, folder=tmp_path)


def test_compiled_data_parallel_training(pool):
    agree(pool, compiled_data_parallel, 2)


def test_distributed_checkpoint(pool, tmp_path):
    agree(pool, saved_and_loaded, 2, folder=tmp_path)


def test_device_mesh(pool):
    agree(pool, meshes, 4)


@pytest.mark.parametrize(
    ("name", "world", "args"),
    [("fsdp", 2, ("fp32",)), ("data_parallel", 2, ("none",)), ("tensor_parallel", 2, ()), ("meshes", 4, ())],
)
def test_debug_mode(pool, tmp_path, name, world, args):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL changes no result."""
    plain = pool.values(globals()[name], world, *args, join="dist:ringlet")
    checked = pool.values(in_debug_mode, world, str(tmp_path / "store"), name, *args, join="nothing")
    assert checked == plain
