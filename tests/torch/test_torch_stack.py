"""What stands on torch.distributed (torch_stack.py) runs on ringlet as it does on gloo."""

from __future__ import annotations

import pytest

import torch_stack

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
    agree(pool, torch_stack.fsdp, world, precision, tolerance=TOLERANCE_OF_BF16 if precision == "bf16" else TOLERANCE)


def test_fully_sharded_on_a_mesh_of_two_dimensions(pool):
    agree(pool, torch_stack.hybrid_fsdp, 4)


@pytest.mark.parametrize("hook", ["none", "static graph", "bf16", "power_sgd"])
def test_data_parallel_training(pool, hook):
    agree(pool, torch_stack.data_parallel, 2, hook)


def test_zero_redundancy_optimizer(pool):
    agree(pool, torch_stack.zero_optimizer, 2)


def test_tensor_parallel_training(pool):
    agree(pool, torch_stack.tensor_parallel, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_placements_of_a_distributed_tensor(pool, world):
    agree(pool, torch_stack.placements, world)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functional_collectives(pool, tmp_path, backend):
    agree(pool, torch_stack.compiled, 2, backend, folder=tmp_path)


def test_compiled_data_parallel_training(pool):
    agree(pool, torch_stack.compiled_data_parallel, 2)


def test_distributed_checkpoint(pool, tmp_path):
    agree(pool, torch_stack.saved_and_loaded, 2, folder=tmp_path)


def test_device_mesh(pool):
    agree(pool, torch_stack.meshes, 4)


@pytest.mark.parametrize(
    ("name", "world", "args"),
    [("fsdp", 2, ("fp32",)), ("data_parallel", 2, ("none",)), ("tensor_parallel", 2, ()), ("meshes", 4, ())],
)
def test_debug_mode(pool, tmp_path, name, world, args):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL changes no result."""
    plain = pool.values(getattr(torch_stack, name), world, *args, join="dist:ringlet")
    checked = pool.values(torch_stack.in_debug_mode, world, str(tmp_path / "store"), name, *args, join="nothing")
    assert checked == plain
