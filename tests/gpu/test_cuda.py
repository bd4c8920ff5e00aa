"""CUDA tensors through peers' memory and over NCCL, on one GPU: the contract with ranks as threads; CUDA IPC, messages,
CUDA graphs, DDP, and a rank that does not come with ranks as processes. Needs a GPU, and for NCCL one that lets ranks
share it (2.30.3 or later); `make gpu-check` sets what that needs, and runs each mark apart.

Processes take turns on the GPU, in time slices of some milliseconds, so they make few calls. The file's order is that
of the run: what is cheap first, what may hang last.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
from cases import ALGORITHMS, MOVES, ONLY_IN_PLACE, Case, Checks, counts_of, roots_of, run
from exact_data import DTYPES, OPS, supported
from ranks import TIMEOUT_SECONDS
from ringlet.schedule.collectives import REDUCTIONS

EXAMPLES = str(pathlib.Path(__file__).resolve().parents[2] / "examples")
PAIRS = [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if supported(dtype, op)]
EVERY = {2: 1, 3: 3, 4: 3}  # larger worlds try one pair in so many, each world others
WAYS = {"NCCL": 0, "peer memory": 1 << 60, "by size": None}
over_nccl, through_peers, in_threads = pytest.mark.nccl, pytest.mark.processes, pytest.mark.threads
each_way = pytest.mark.parametrize(
    "way",
    [pytest.param("peer memory", id="peers", marks=through_peers), pytest.param("NCCL", id="nccl", marks=over_nccl)],
)


def choose(way: str) -> None:
    """What the rank's calls go through on a GPU where its group has made none yet."""
    os.environ.pop("RINGLET_PEER_MEMORY_BYTES", None)
    if WAYS[way] is not None:
        os.environ["RINGLET_PEER_MEMORY_BYTES"] = str(WAYS[way])


def go(way: str) -> None:
    """As `choose`, of the group of `ringlet.init`; and it is so."""
    choose(way)
    told = ringlet.current().gpu_transport("cuda")
    assert told.startswith("peer memory" if WAYS[way] else "NCCL"), told


@pytest.mark.smoke
def test_the_library_reaches_the_device():
    assert ringlet._C.gpu_status()["state"] == "ready"


def summed(rank: int, world: int) -> None:
    go("peer memory")
    tensor = torch.full((1000,), rank + 1.0, device="cuda")
    ringlet.all_reduce(tensor)
    assert tensor.unique().tolist() == [world * (world + 1) / 2]


@pytest.mark.smoke
def test_processes_reach_each_others_memory(pool):
    pool.values(summed, 2)


def differ(rank: int, world: int) -> str:
    go("peer memory")
    with pytest.raises(ringlet.InvalidUsage) as caught:
        ringlet.all_reduce(torch.ones(10 + rank, device="cuda"), async_op=True).wait(timeout=60)
    return str(caught.value)


@through_peers
def test_calls_that_differ_are_named(pool):
    for said in pool.values(differ, 2):
        assert "10 elements" in said and "11 elements" in said


def messages(rank: int, world: int) -> None:
    """Round a ring: rank 0 sends first, the others when they have received."""
    choose("by size")
    tensor = torch.full((100_000,), float(rank), device="cuda")
    if rank == 0:
        ringlet.send(tensor, 1)
    ringlet.recv(tensor, (rank - 1) % world)
    if rank > 0:
        ringlet.send(tensor.add_(1), (rank + 1) % world)
    assert tensor.unique().tolist() == [float(rank if rank > 0 else world - 1)]


@over_nccl
@pytest.mark.parametrize("world", (2, 3))
def test_messages(pool, world):
    pool.values(messages, world)


def registered(rank: int, world: int) -> None:
    os.environ["RINGLET_GPU_HEAP_MIB"] = "64"  # the process's from now on
    go("peer memory")
    tensor = ringlet.empty(100_003, device="cuda")
    for algorithm in ALGORITHMS["all_reduce"]:
        tensor.fill_(rank + 1.0)
        ringlet.all_reduce(tensor, algorithm=algorithm)
        assert tensor.unique().tolist() == [world * (world + 1) / 2], algorithm


@through_peers
@pytest.mark.parametrize("world", (2, 3))
def test_registered_memory(pool, world):
    pool.values(registered, world)


def replayed(rank: int, world: int, way: str, times: int) -> None:
    go(way)
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
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    assert tensor.unique().tolist() == [times * (world + 1) / 2]


@each_way
@pytest.mark.parametrize("times", (100, 1000))
def test_a_graph_is_replayed(pool, times, way):
    pool.values(replayed, 2, way, times)


def contract(rank: int, world: int) -> None:
    """All algorithms at all counts, then pairs of dtype and operation, on a stream of the rank's own."""
    with torch.cuda.stream(torch.cuda.Stream()):
        go("peer memory")
        checks = Checks()
        for collective in REDUCTIONS + MOVES:
            place = collective in ONLY_IN_PLACE
            for algorithm, count in itertools.product((*ALGORITHMS[collective], "auto"), counts_of(collective, world)):
                root = (count + world) % len(roots_of(collective, world))
                run(Case(collective, algorithm, torch.int32, "sum", count, "cuda", place, root), rank, world, checks)
        for number, (dtype, op) in enumerate(PAIRS[world % EVERY[world] :: EVERY[world]]):
            for collective in REDUCTIONS:
                algorithm = ALGORITHMS[collective][number % len(ALGORITHMS[collective])]
                run(Case(collective, algorithm, dtype, op, world + 1, "cuda", True), rank, world, checks)
        checks.conclude()


@through_peers
def test_the_example():
    """Of one rank, as there may be one GPU. Two processes import torch, one after the other."""
    command = [sys.executable, "-m", "ringlet", "run", "-n", "1", f"{EXAMPLES}/gpu.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45)
    assert done.returncode == 0, done.stderr
    assert "average 1.0, gradient " in done.stdout


@in_threads
@pytest.mark.parametrize("world", (2, 3, 4))
def test_the_contract(world):
    ringlet.spawn(contract, world, (world,), transport="threads", timeout=TIMEOUT_SECONDS)


def trained(rank: int, world: int, device: str, wrap: str, way: str) -> list[float]:
    """The losses of ten steps on the demo's model, with DDP or ringlet's reducer."""
    choose(way)
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)  # not as a part of `examples`: an installed package may have that name
    from char_transformer import CharTransformer, Size

    torch.manual_seed(0)
    size = Size(width=64, layers=2)
    model = CharTransformer(96, size).to(device)
    wrapped = model
    if wrap == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        reducer = ringlet.GradientReducer(model)  # noqa: F841 -- lives while it reduces
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


@over_nccl
@pytest.mark.parametrize("way", [pytest.param("NCCL", id="nccl"), pytest.param("by size", id="by_size")])
@pytest.mark.parametrize("wrap", ["DDP", "reducer"])
def test_training_equals_the_cpu_within_rounding(pool, wrap, way):
    host = pool.values(trained, 2, "cpu", wrap, way, join="dist:ringlet")
    device = pool.values(trained, 2, "cuda", wrap, way, join="dist:ringlet")
    torch.testing.assert_close(torch.tensor(device), torch.tensor(host), rtol=1e-4, atol=1e-4)


def many_segments(rank: int, world: int, way: str) -> None:
    go(way)
    for algorithm in ALGORITHMS["all_reduce"]:
        tensor = torch.full((16 << 20,), rank + 1.0, device="cuda")
        ringlet.all_reduce(tensor, algorithm=algorithm)
        assert bool((tensor == world * (world + 1) / 2).all()), algorithm


@each_way
def test_many_segments(pool, way):
    pool.values(many_segments, 2, way)


def alone(rank: int, world: int, way: str, store: str) -> str:
    """Rank 1 stays in the group, and does not make the call."""
    go(way)
    others = dist.FileStore(store, world)
    tensor = torch.ones(1000, device="cuda")
    ringlet.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        others.wait(["done"], timedelta(seconds=15))
        return ""
    with pytest.raises(ringlet.Timeout) as caught:
        ringlet.all_reduce(tensor, async_op=True, timeout=1.0).wait(timeout=60)
    torch.cuda.synchronize()  # the stream is free again
    others.set("done", "")
    return str(caught.value)


@each_way
def test_a_rank_that_does_not_come(pool, way, tmp_path):
    said = pool.values(alone, 2, way, str(tmp_path / "store"))[0]
    assert "all_reduce #1" in said and ("deadline" if way == "NCCL" else "waited too long for rank 1") in said
