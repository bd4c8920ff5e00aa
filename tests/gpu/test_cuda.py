"""CUDA tensors over NCCL, ranks as processes that share one GPU: the contract, CUDA graphs, DDP, and a rank that does
not come. Needs a GPU and an NCCL that lets ranks share it (2.30.3 or later); `make gpu-check` sets what that needs."""

from __future__ import annotations

import itertools

import pytest
import torch
from examples.char_transformer import CharTransformer, Size

import ringlet
from cases import ALGORITHMS, MOVES, ONLY_IN_PLACE, REDUCTIONS, Case, Checks, counts_of, roots_of, run
from exact_data import DTYPES, OPS, supported

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

WORLDS = (2, 3, 4)


def every_dtype_and_op(rank: int, world: int) -> None:
    checks = Checks()
    for dtype, op in itertools.product(DTYPES, OPS):
        for collective in REDUCTIONS if supported(dtype, op) else ():
            for algorithm in ALGORITHMS[collective]:
                run(Case(collective, algorithm, dtype, op, world + 1, "cuda", True), rank, world, checks)
    checks.conclude()


@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype_and_op(pool, world):
    pool.values(every_dtype_and_op, world)


def every_algorithm_count_and_root(rank: int, world: int) -> None:
    checks = Checks()
    for collective in REDUCTIONS + MOVES:
        place = collective in ONLY_IN_PLACE
        for algorithm, count in itertools.product((*ALGORITHMS[collective], "auto"), counts_of(collective, world)):
            root = (count + world) % len(roots_of(collective, world))
            run(Case(collective, algorithm, torch.int32, "sum", count, "cuda", place, root), rank, world, checks)
    checks.conclude()


@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_count_and_root(pool, world):
    pool.values(every_algorithm_count_and_root, world)


def many_slabs(rank: int, world: int) -> None:
    for algorithm in ALGORITHMS["all_reduce"]:
        tensor = torch.full((16 << 20,), rank + 1.0, device="cuda")
        ringlet.all_reduce(tensor, algorithm=algorithm)
        assert bool((tensor == world * (world + 1) / 2).all()), algorithm


def test_many_slabs(pool):
    pool.values(many_slabs, 2)


def replayed(rank: int, world: int) -> None:
    tensor = torch.zeros(10_000, device="cuda")
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        ringlet.ring_allreduce(tensor)  # NCCL connects outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(rank + 1.0)
        ringlet.ring_allreduce(tensor, op="avg")
    tensor.zero_()
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert tensor.unique().tolist() == [1000 * (world + 1) / 2]


def test_a_graph_is_replayed_1000_times(pool):
    pool.values(replayed, 2)


def trained(rank: int, world: int, device: str) -> list[float]:
    """The losses of ten steps of DDP on the demo's model."""
    torch.manual_seed(0)
    size = Size(width=64, layers=2)
    model = CharTransformer(96, size).to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(10):
        batch = torch.randint(96, (size.batch, size.context + 1), generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(wrapped(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ddp_equals_the_cpu_within_rounding(pool):
    host = pool.values(trained, 2, "cpu", join="dist:ringlet")
    device = pool.values(trained, 2, "cuda", join="dist:ringlet")
    torch.testing.assert_close(torch.tensor(device), torch.tensor(host), rtol=1e-4, atol=1e-4)


def alone(rank: int, world: int) -> str:
    tensor = torch.ones(1000, device="cuda")
    ringlet.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        return ""
    with pytest.raises(ringlet.Timeout) as caught:
        ringlet.all_reduce(tensor, async_op=True, timeout=1.0).wait(timeout=60)
    torch.cuda.synchronize()  # the stream is free again
    return str(caught.value)


def test_a_rank_that_does_not_come(pool):
    assert "all_reduce #1" in pool.values(alone, 2)[0]


def test_the_library_reaches_the_device():
    assert ringlet._C.gpu_status()["state"] == "ready"
