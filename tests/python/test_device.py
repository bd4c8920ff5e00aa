"""Tensors on a GPU, on one of the host (live_gpu.py), through the Python calls and through the backend's virtuals: the
contract, the order of streams, what is refused, and what becomes of a call that is never done."""

from __future__ import annotations

import itertools
import os
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


# What collectives go through: RINGLET_PEER_MEMORY_BYTES.
THROUGH = {"both": None, "NCCL": "0", "peer memory": str(1 << 60)}


def set_way(rank: int, world: int, bytes_: str | None) -> None:
    os.environ.pop("RINGLET_PEER_MEMORY_BYTES", None)
    if bytes_ is not None:
        os.environ["RINGLET_PEER_MEMORY_BYTES"] = bytes_


@pytest.fixture
def way(pool, request):
    pool.values(set_way, 1, THROUGH[request.param], join="nothing")
    yield request.param
    pool.values(set_way, 1, None, join="nothing")


each_way = pytest.mark.parametrize("way", THROUGH, indirect=True)


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


@each_way
@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype_and_op(pool, world, way):
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


@each_way
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("collective", REDUCTIONS + MOVES)
def test_every_algorithm_count_and_root(pool, collective, world, way):
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


@each_way
def test_calls_follow_streams(pool, way):
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
        lambda: ringlet.send(there, rank),
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
                "has no such peer",
                "band is not defined",
                "no such",
                "overlap",
            ),
            strict=True,
        ):
            assert words in text


def around(rank: int, world: int) -> None:
    """Messages go on streams like collectives, and between two ranks they meet in order."""
    live_gpu.load()
    mine, theirs = filled(float(rank), 100_000), filled(-1.0, 100_000)
    for turn in range(3):
        if rank == 0:
            ringlet.send(mine, 1)
            ringlet.recv(theirs, world - 1)
        else:
            ringlet.recv(theirs, rank - 1)
            ringlet.send(mine.add_(turn), (rank + 1) % world, async_op=True).wait()
    last = (rank - 1) % world
    assert theirs.cpu().unique().tolist() == [float(last + (3 if last > 0 else 0))]


def test_messages(pool):
    pool.values(around, 3, join="threads")


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


@each_way
def test_a_call_that_is_never_done_ends_with_timeout(pool, way):
    said = pool.values(alone, 2, join="threads")[0]
    assert "all_reduce #1" in said and "rank 0 of 2" in said
    assert ("deadline" if way == "NCCL" else "waited too long for rank 1, at round 0") in said


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
        lambda: backend.send([tensor], (rank + 1) % world, 7),
        lambda: backend.recv_anysource([tensor], 0),
        lambda: backend.allreduce([tensor, tensor], dist.AllreduceOptions()),
    ):
        with pytest.raises(ringlet.InvalidUsage):
            wrong()
    backend.shutdown()


@each_way
@pytest.mark.parametrize("world", [2, 3])
def test_through_the_backend(pool, world, way):
    pool.values(through_the_backend, world, f"backend {world} {way}", join="threads")


def on(values: torch.Tensor) -> torch.Tensor:
    return values.to(live_gpu.DEVICE)


def uneven_blocks(rank: int, world: int, name: str) -> None:
    """Some ranks' blocks are equal and some are not; some tensors are not contiguous."""
    backend = backend_of(rank, world, name)
    sizes = [3 * q % 4 for q in range(world)]  # 0 among them

    parts = [on(torch.full((2, size), -1.0)) for size in sizes]
    parts[-1] = on(torch.full((sizes[-1], 2), -1.0)).t()
    backend.allgather([parts], [on(torch.full((2, sizes[rank]), float(rank)))]).wait()
    for q, part in enumerate(parts):
        assert part.shape == (2, sizes[q]) and part.cpu().flatten().tolist() == [float(q)] * 2 * sizes[q]

    mine = on(torch.zeros(sizes[rank]))
    backend.reduce_scatter([mine], [[on(torch.full((size,), float(rank + q))) for q, size in enumerate(sizes)]]).wait()
    assert mine.cpu().tolist() == [float(sum(r + rank for r in range(world)))] * sizes[rank]

    def share(source: int, to: int) -> int:
        return 2 if source == 0 else (source + to) % 3  # rank 0 gives all the same

    inputs = [on(torch.full((share(rank, q), 5), 10.0 * rank + q)) for q in range(world)]
    outputs = [on(torch.zeros(share(q, rank), 5)) for q in range(world)]
    backend.alltoall(outputs, inputs).wait()
    flat = on(torch.zeros(sum(share(q, rank) for q in range(world)), 5))
    given = on(torch.cat([one.cpu() for one in inputs]))
    backend.alltoall_base(
        flat, given, [share(q, rank) for q in range(world)], [share(rank, q) for q in range(world)]
    ).wait()
    for q, output in enumerate(outputs):
        assert output.cpu().unique().tolist() == [10.0 * q + rank] * (share(q, rank) > 0)
    assert torch.equal(flat.cpu(), torch.cat([output.cpu() for output in outputs]))
    backend.shutdown()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_uneven_blocks(pool, world):
    pool.values(uneven_blocks, world, f"uneven {world}", join="threads")


def messages_together(rank: int, world: int, name: str) -> None:
    """Each rank first sends, then receives: alone each send would wait for ever."""
    backend = backend_of(rank, world, name)
    group = dist.ProcessGroup(dist.HashStore(), rank, world)
    group._register_backend(torch.device(live_gpu.DEVICE), dist.ProcessGroup.BackendType.CUSTOM, backend)
    after, before = (rank + 1) % world, (rank - 1) % world
    got = [filled(-1.0, 1000) for _ in range(2)]
    for _ in range(2):
        group._start_coalescing(torch.device(live_gpu.DEVICE))
        for turn in range(2):
            group.send([filled(rank + turn / 2, 1000)], after, 0)
        handle = group.recv([got[0]], before, 0)
        group.recv([got[1]], before, 0)
        group._end_coalescing(torch.device(live_gpu.DEVICE)).wait()
        handle.wait()
    assert [one.cpu().unique().tolist() for one in got] == [[float(before)], [before + 0.5]]
    if rank < 2:  # and one by one
        work = backend.send([got[0]], 1, 0) if rank == 0 else backend.recv([got[0]], 0, 0)
        work.wait(timedelta(seconds=60))
        assert work.is_completed()
    backend.barrier().wait()
    backend.shutdown()


def test_messages_together(pool):
    pool.values(messages_together, 3, "messages", join="threads")


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
