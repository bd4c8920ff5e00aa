"""Tensors on a GPU, on one of the host (emulated_gpu.py), through the virtuals of torch.distributed's backend: lists,
uneven blocks, messages, futures, and calls made together."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import emulated_gpu
import ringlet
from emulated_gpu import each_way, filled
from ranks import on
from ringlet import _C

pytestmark = emulated_gpu.needs_build

STORES: dict[str, dist.HashStore] = {}
LOCK = threading.Lock()


def backend_of(rank: int, world: int) -> _C.Backend:
    name = ringlet.current().name
    with LOCK:
        store = STORES.setdefault(name, dist.HashStore())
    return _C.make_backend(store, name, rank, world, timedelta(seconds=60), "shared_memory")


@on(3, "gpu")
@each_way
def test_through_the_backend(rank: int, world: int) -> None:
    backend = backend_of(rank, world)
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

    turned = torch.zeros(5, world).to(emulated_gpu.DEVICE).t()  # not contiguous
    backend.broadcast([whole := filled(float(rank), 5 * world)], dist.BroadcastOptions()).wait()
    backend.reduce_scatter([mine := filled(0.0, 5)], [[filled(float(q), 5) for q in range(world)]]).wait()
    assert mine.cpu().tolist() == [float(rank * world)] * 5 and whole.cpu().tolist() == [0.0] * 5 * world
    backend.allgather([list(turned)], [filled(float(rank), 5)]).wait()
    assert torch.equal(turned.cpu()[:, 2], ranks)

    backend._allgather_base(gathered := filled(0.0, 3 * world), filled(float(rank), 3)).wait()
    assert torch.equal(gathered.cpu()[::3], ranks)
    backend.alltoall_base(
        swapped := filled(0.0, world), torch.full((world,), float(rank)).to(emulated_gpu.DEVICE), [], []
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


def moved(values: torch.Tensor) -> torch.Tensor:
    return values.to(emulated_gpu.DEVICE)


@on((1, 4), "gpu")
def test_uneven_blocks(rank: int, world: int) -> None:
    """Some ranks' blocks are equal and some are not; some tensors are not contiguous."""
    backend = backend_of(rank, world)
    sizes = [3 * q % 4 for q in range(world)]  # 0 among them

    parts = [moved(torch.full((2, size), -1.0)) for size in sizes]
    parts[-1] = moved(torch.full((sizes[-1], 2), -1.0)).t()
    backend.allgather([parts], [moved(torch.full((2, sizes[rank]), float(rank)))]).wait()
    for q, part in enumerate(parts):
        assert part.shape == (2, sizes[q]) and part.cpu().flatten().tolist() == [float(q)] * 2 * sizes[q]

    mine = filled(0.0, sizes[rank])
    backend.reduce_scatter([mine], [[filled(float(rank + q), size) for q, size in enumerate(sizes)]]).wait()
    assert mine.cpu().tolist() == [float(sum(r + rank for r in range(world)))] * sizes[rank]

    def share(source: int, to: int) -> int:
        return 2 if 0 in (source, to) else (source + to) % 3  # rank 0 gives and gets equal blocks

    inputs = [moved(torch.full((share(rank, q), 5), 10.0 * rank + q)) for q in range(world)]
    outputs = [moved(torch.zeros(share(q, rank), 5)) for q in range(world)]
    backend.alltoall(outputs, inputs).wait()
    flat = moved(torch.zeros(sum(share(q, rank) for q in range(world)), 5))
    given = moved(torch.cat([one.cpu() for one in inputs]))
    backend.alltoall_base(
        flat, given, [share(q, rank) for q in range(world)], [share(rank, q) for q in range(world)]
    ).wait()
    for q, output in enumerate(outputs):
        assert output.cpu().unique().tolist() == [10.0 * q + rank] * (share(q, rank) > 0)
    assert torch.equal(flat.cpu(), torch.cat([output.cpu() for output in outputs]))
    backend.shutdown()


@on(3, "gpu")
def test_messages_together(rank: int, world: int) -> None:
    """Each rank first sends, then receives: alone each send would wait for ever."""
    backend = backend_of(rank, world)
    group = dist.ProcessGroup(dist.HashStore(), rank, world)
    group._register_backend(torch.device(emulated_gpu.DEVICE), dist.ProcessGroup.BackendType.CUSTOM, backend)
    after, before = (rank + 1) % world, (rank - 1) % world
    got = [filled(-1.0, 1000) for _ in range(2)]
    for _ in range(2):
        group._start_coalescing(torch.device(emulated_gpu.DEVICE))
        for turn in range(2):
            group.send([filled(rank + turn / 2, 1000)], after, 0)
        handle = group.recv([got[0]], before, 0)
        group.recv([got[1]], before, 0)
        together = group._end_coalescing(torch.device(emulated_gpu.DEVICE))
        together.wait(timedelta(seconds=60))
        handle.wait()
        deadline = time.monotonic() + 60
        while not together.is_completed():  # of all its parts
            assert time.monotonic() < deadline
    assert [one.cpu().unique().tolist() for one in got] == [[float(before)], [before + 0.5]]
    if rank < 2:  # and one by one
        work = backend.send([got[0]], 1, 0) if rank == 0 else backend.recv([got[0]], 0, 0)
        work.wait(timedelta(seconds=60))
        assert work.is_completed()
    backend.barrier().wait()
    backend.shutdown()


@on(3, "gpu")
def test_futures_and_calls_together(rank: int, world: int) -> None:
    backend = backend_of(rank, world)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    backend.algorithm = "ring"
    backend.allreduce([ones := filled(1.0)], options).wait()
    assert ones.cpu().tolist() == [float(world)] * 1000
    doubled = backend.allreduce([ones], options).get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().cpu().tolist() == [2.0 * world**2] * 1000

    group = dist.ProcessGroup(dist.HashStore(), rank, world)  # as torch.distributed makes it
    group._register_backend(torch.device(emulated_gpu.DEVICE), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._start_coalescing(torch.device(emulated_gpu.DEVICE))
    several = [filled(float(rank + q)) for q in range(3)]
    for one in several:
        group.allreduce([one], dist.AllreduceOptions())
    group._end_coalescing(torch.device(emulated_gpu.DEVICE)).wait()
    assert [one.cpu()[7].item() for one in several] == [sum(r + q for r in range(world)) for q in range(3)]
    backend.shutdown()


@on(2, "gpu")
@each_way
def test_waiting_orders_inputs(rank: int, world: int) -> None:
    """Off the root a gather has no result; what is written to its input after wait() comes after it all the same."""
    backend = backend_of(rank, world)
    backend.allreduce([filled(1.0)], dist.AllreduceOptions()).wait()  # the ranks have met
    mine, options = filled(rank + 1.0), dist.GatherOptions()
    if rank == 0:
        time.sleep(0.3)  # time enough to overwrite what has not been read
    backend.allreduce([filled(1.0)], dist.AllreduceOptions())  # keeps the gather from beginning before rank 0 comes
    parts = [[filled(0.0) for _ in range(world)]] if rank == 0 else []
    backend.gather(parts, [mine], options).wait()
    mine.zero_()
    if rank == 0:
        assert [part.cpu().unique().tolist() for part in parts[0]] == [[q + 1.0] for q in range(world)]
    backend.shutdown()


@on(2, "gpu")
def test_bound_to_a_device(rank: int, world: int) -> None:
    """What torch.distributed asks of a backend whose default group is bound to a GPU."""
    backend = backend_of(rank, world)
    assert backend.supports_splitting
    backend.eager_connect_single_device(torch.device(emulated_gpu.DEVICE))
    backend.perform_nocolor_split(torch.device(emulated_gpu.DEVICE))  # on ranks outside of a new group
    backend.algorithm = "butterfly"
    options = copy.deepcopy(backend.options)
    options.algorithm = "ring"
    assert (options.transport, backend.options.algorithm) == ("shared_memory", "butterfly")
    backend.shutdown()
