"""Tensors on a GPU, on one of the host (live_gpu.py), through the Python calls and through the backend's virtuals: the
contract, the order of streams, what is refused, and what becomes of a call that is never done."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import live_gpu
import ringlet
from cases import ALGORITHMS, MOVES, ONLY_IN_PLACE, REDUCTIONS, Case, Checks, counts_of, roots_of, run
from exact_data import DTYPES, OPS, supported
from ranks import Pool
from ringlet import _C

pytestmark = pytest.mark.skipif(_C.gpu_status()["state"] == "not built", reason="the build found no nvcc")

WORLDS = (1, 2, 3, 5, 8)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A process of these tests' own: torch keeps a device that it was given."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()


def filled(value: float, count: int = 1000) -> torch.Tensor:
    return torch.full((count,), value).to(live_gpu.DEVICE)


def every_dtype_and_op(rank: int, world: int) -> None:
    live_gpu.load()
    checks = Checks()
    pairs = [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if supported(dtype, op)]
    for number, (dtype, op) in enumerate(pairs):
        for collective in REDUCTIONS:
            algorithm = ALGORITHMS[collective][number % len(ALGORITHMS[collective])]
            in_place = collective in ONLY_IN_PLACE or number % 2 == 0
            run(Case(collective, algorithm, dtype, op, world + 1, "gpu", in_place), rank, world, checks)
    checks.conclude()


@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype_and_op(pool, world):
    pool.values(every_dtype_and_op, world, join="threads")


def every_algorithm_count_and_root(rank: int, world: int, collective: str) -> None:
    live_gpu.load()
    checks = Checks()
    places = (True,) if collective in ONLY_IN_PLACE else (False,) if collective == "all_to_all" else (True, False)
    for algorithm, count, in_place in itertools.product(
        (*ALGORITHMS[collective], "auto"), counts_of(collective, world), places
    ):
        root = (count + world) % len(roots_of(collective, world))
        run(Case(collective, algorithm, torch.int32, "sum", count, "gpu", in_place, root), rank, world, checks)
    checks.conclude()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", REDUCTIONS + MOVES)
def test_every_algorithm_count_and_root(pool, collective, world):
    pool.values(every_algorithm_count_and_root, world, collective, join="threads")


def on_streams(rank: int, world: int) -> None:
    """Calls follow the current stream; asynchronous ones go beside it until it is made to wait."""
    live_gpu.load()
    for own in (False, True):
        if own:
            live_gpu.use_own_stream()
        tensor = filled(rank + 1.0, 200_000)
        for _ in range(3):
            ringlet.ring_allreduce(tensor, op="avg")
        works = [ringlet.all_reduce(tensor, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        assert tensor.cpu().unique().tolist() == [(world + 1) / 2 * world**2]
        works[0].wait(timeout=60)
        assert works[0].done()
    live_gpu.use_default_stream()


def test_calls_follow_streams(pool):
    pool.values(on_streams, 3, join="threads")


COME = threading.Event()


def comes_later(rank: int, world: int) -> bool:
    live_gpu.load()
    tensor = filled(rank + 1.0)
    ringlet.broadcast(tensor)  # the group's GPU part is there
    if rank == 1:
        assert COME.wait(60)
    work = ringlet.all_reduce(tensor, async_op=True)
    waiting = not work.done()
    COME.set()
    work.wait(timeout=60)
    assert work.done() and tensor.cpu().tolist() == [2.0] * 1000
    return waiting


def test_the_host_does_not_wait(pool):
    assert pool.values(comes_later, 2, join="threads")[0]


def refused(rank: int, world: int) -> list[str]:
    live_gpu.load()
    here, there = torch.ones(4), filled(1.0, 4)
    said = []
    for call in (
        lambda: ringlet.all_reduce(there, output=here),
        lambda: ringlet.all_reduce(here, output=there),
        lambda: ringlet.send(there, 1 - rank),
        lambda: ringlet.all_reduce(there, op="band"),
        lambda: ringlet.all_reduce(there, algorithm="no such"),
        lambda: ringlet.all_to_all(there, there),
    ):
        with pytest.raises(ringlet.InvalidUsage) as caught:
            call()
        said.append(str(caught.value))
    ringlet.all_reduce(there)
    assert there.cpu().tolist() == [2.0] * 4
    return said


def test_what_is_refused_harms_nothing(pool):
    for said in pool.values(refused, 2, join="threads"):
        for text, words in zip(
            said,
            (
                "tensors on cpu and on privateuseone:0 in one call",
                "tensors on privateuseone:0 and on cpu in one call",
                "send: the tensor is on privateuseone:0",
                "band is not defined",
                "no such",
                "overlap",
            ),
            strict=True,
        ):
            assert words in text


def alone(rank: int, world: int) -> str:
    live_gpu.load()
    tensor = filled(1.0)
    ringlet.broadcast(tensor)
    if rank == 0:
        with pytest.raises(ringlet.Timeout) as caught:
            ringlet.all_reduce(tensor, async_op=True, timeout=0.1).wait(timeout=60)
        for later in (tensor, torch.ones(4)):
            with pytest.raises(ringlet.Timeout):
                ringlet.all_reduce(later)
        return str(caught.value)
    return ""


def test_a_call_that_is_never_done_ends_with_timeout(pool):
    said = pool.values(alone, 2, join="threads")[0]
    assert "all_reduce #1" in said and "rank 0 of 2" in said and "deadline" in said


# --- the backend


STORES: dict[str, dist.HashStore] = {}
LOCK = threading.Lock()


def backend_of(rank: int, world: int, name: str) -> _C.Backend:
    live_gpu.load()
    with LOCK:
        store = STORES.setdefault(name, dist.HashStore())
    return _C.make_backend(store, name, rank, world, timedelta(seconds=60), "shared_memory")


def through_the_backend(rank: int, world: int, name: str) -> None:
    backend = backend_of(rank, world, name)
    ranks = torch.arange(world, dtype=torch.float32)

    tensor = filled(rank + 1.0, 100_000)
    works = [backend.allreduce([tensor], dist.AllreduceOptions()) for _ in range(2)]
    works[0].wait()
    works[1].wait()
    assert tensor.cpu().unique().tolist() == [world * (world + 1) / 2 * world]
    assert torch.equal(works[1].get_future().wait()[0].cpu(), tensor.cpu())

    parts = [filled(0.0, 5) for _ in range(world)]
    backend.allgather([parts], [filled(float(rank), 5)]).wait()
    assert torch.equal(torch.stack([part.cpu() for part in parts])[:, 4], ranks)

    turned = torch.zeros(5, world).to(live_gpu.DEVICE).t()  # not contiguous
    backend.broadcast([whole := filled(float(rank), 5 * world)], dist.BroadcastOptions()).wait()
    backend.reduce_scatter([mine := filled(0.0, 5)], [[filled(float(q), 5) for q in range(world)]]).wait()
    assert mine.cpu().tolist() == [float(rank * world)] * 5 and whole.cpu().tolist() == [0.0] * 5 * world
    backend.allgather([list(turned)], [filled(float(rank), 5)]).wait()
    assert torch.equal(turned.cpu()[:, 2], ranks)

    backend._allgather_base(gathered := filled(0.0, 3 * world), filled(float(rank), 3)).wait()
    assert torch.equal(gathered.cpu()[::3], ranks)
    backend.alltoall_base(
        swapped := filled(0.0, world), torch.full((world,), float(rank)).to(live_gpu.DEVICE), [], []
    ).wait()
    assert torch.equal(swapped.cpu(), ranks)
    backend.barrier().wait()

    for wrong in (
        lambda: backend.send([tensor], (rank + 1) % world, 0),
        lambda: backend.allreduce([tensor, tensor], dist.AllreduceOptions()),
        lambda: backend.allgather([[filled(0.0, 5 + q) for q in range(world)]], [filled(0.0, 5 + rank)]),
    ):
        with pytest.raises(ringlet.InvalidUsage):
            wrong()
    backend.shutdown()


@pytest.mark.parametrize("world", [2, 3])
def test_through_the_backend(pool, world):
    pool.values(through_the_backend, world, f"backend {world}", join="threads")


def futures_and_calls_together(rank: int, world: int, name: str) -> None:
    backend = backend_of(rank, world, name)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    backend.algorithm = "ring"
    backend.allreduce([ones := filled(1.0)], options).wait()
    assert ones.cpu().tolist() == [float(world)] * 1000
    doubled = backend.allreduce([ones], options).get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().cpu().tolist() == [2.0 * world**2] * 1000

    group = dist.ProcessGroup(dist.HashStore(), rank, world)  # as torch.distributed makes it
    group._register_backend(torch.device(live_gpu.DEVICE), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._start_coalescing(torch.device(live_gpu.DEVICE))
    several = [filled(float(rank + q)) for q in range(3)]
    for one in several:
        group.allreduce([one], dist.AllreduceOptions())
    group._end_coalescing(torch.device(live_gpu.DEVICE)).wait()
    assert [one.cpu()[7].item() for one in several] == [sum(r + q for r in range(world)) for q in range(3)]
    backend.shutdown()


def test_futures_and_calls_together(pool):
    pool.values(futures_and_calls_together, 3, "together", join="threads")
