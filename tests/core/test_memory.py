"""The registered allocator: which tensors are registered, what becomes of them, and that a whole program runs on it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet
from programs import printed
from ranks import on
from ringlet import _C


@pytest.fixture
def registered():
    ringlet.use_registered_allocator()
    yield
    ringlet.use_registered_allocator(False)


def test_large_tensors_are_registered_and_small_ones_are_not(registered):
    assert ringlet.is_registered(torch.empty(8192))  # 32 KiB
    assert ringlet.is_registered(torch.randn(100, 1000).t().contiguous())
    assert ringlet.is_registered(torch.empty(10).resize_(1 << 20))
    assert not ringlet.is_registered(torch.empty(8191))
    assert torch.empty(0).numel() == 0
    for count in (8192, 8193, 100_003):
        assert torch.empty(count).data_ptr() % 64 == 0


def test_switching_back_leaves_tensors_alone():
    ringlet.use_registered_allocator()
    before = torch.full((100_000,), 3.0)
    ringlet.use_registered_allocator(False)
    after = torch.full((100_000,), 4.0)
    assert ringlet.is_registered(before) and not ringlet.is_registered(after)
    ringlet.use_registered_allocator()
    del after  # freed by the allocator that made it
    ringlet.use_registered_allocator(False)
    assert before.unique().tolist() == [3.0]
    del before


def test_freed_blocks_are_used_again(registered):
    gc.collect()
    before = _C.heap()["allocated_bytes"]
    for _ in range(100):
        tensor = torch.empty(1 << 20)
        place = tensor.data_ptr()
        del tensor
    assert torch.empty(1 << 20).data_ptr() == place
    assert _C.heap()["allocated_bytes"] - before <= 4 << 20
    assert _C.registered_allocator_cache_bytes() >= 4 << 20


FULL = """
import ringlet

kept = [ringlet.empty(1 << 18) for _ in range(400)]
del kept
print(ringlet.empty(300 << 18).nbytes >> 20)
"""


def test_a_full_heap_gives_back_what_is_kept():
    """Freed blocks are kept for later tensors of their size, up to 512 MiB in all."""
    assert printed(sys.executable, "-c", FULL, env=os.environ | {"RINGLET_HEAP_MIB": "512"}) == "300\n"


def in_child(tensor: torch.Tensor, report) -> None:
    torch.set_num_threads(1)  # as a DataLoader does: the threads of the parent are not here
    own = torch.full((100_000,), 2.0)
    sums = (tensor.sum().item(), own.sum().item(), ringlet.is_registered(own))
    tensor.fill_(3)  # its own copy
    del tensor, own
    gc.collect()
    report.send(sums)
    report.close()
    os._exit(0)


def test_the_profiler_hears_how_many_bytes_are_in_use(registered, tmp_path):
    """As of torch's own allocator."""
    before = torch.empty(1 << 20)  # noqa: F841 -- in use
    with torch.profiler.profile(profile_memory=True) as profiler:
        tensor = torch.empty(1 << 20)
        del tensor
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    made, freed = [e["args"] for e in events if e.get("name") == "[memory]" and abs(e["args"]["Bytes"]) == 4 << 20]
    assert made["Total Allocated"] >= 8 << 20
    assert freed["Total Allocated"] == made["Total Allocated"] - (4 << 20)


def test_a_forked_child_allocates_for_itself(registered):
    """As a DataLoader's worker does."""
    tensor = torch.full((100_000,), 1.0)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(tensor, theirs))
    child.start()
    assert ours.recv() == (100_000.0, 200_000.0, False)
    child.join()
    assert torch.full((100_000,), 5.0).unique().tolist() == [5.0] and tensor.unique().tolist() == [1.0]


def train(rank: int, world: int, own_memory: bool) -> tuple[list[float], bool]:
    ringlet.use_registered_allocator(own_memory)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for step in range(4):
            inputs = torch.randn(200, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(parallel(inputs), inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        gradient = model[0].weight.grad
        assert gradient is not None
        return losses, ringlet.is_registered(gradient)
    finally:
        ringlet.use_registered_allocator(False)


def test_ddps_own_buckets_are_registered(pool):
    ours = pool.values(train, 2, True, join="dist:ringlet")
    theirs = pool.values(train, 2, False, join="dist:ringlet")
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs]
    assert all(registered for _, registered in ours) and not any(registered for _, registered in theirs)


@on("two")
def test_the_backend_hands_out_registered_memory(rank: int, world: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    device = torch.device("cpu")
    assert backend.supports_tensor_alloc(device)
    assert ringlet.is_registered(backend.allocate_tensor(10, dtype=torch.bfloat16, device=device))
