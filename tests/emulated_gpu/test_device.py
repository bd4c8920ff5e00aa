"""Tensors on a GPU, on one of the host (emulated_gpu.py), through the Python calls: the contract, the order of
streams, messages, what is refused, and what becomes of a call that is never done."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from dataclasses import asdict, replace

import pytest
import torch

import emulated_gpu
import ringlet
from cases import ALGORITHMS, MOVES, ONLY_IN_PLACE, Case, Checks, roots_of, run
from emulated_gpu import each_way, filled
from exact_data import DTYPES, OPS, supported
from ranks import on
from ringlet import _C
from ringlet.bench.cases import Sweep
from ringlet.bench.ranks.case import Case as BenchCase
from ringlet.bench.ranks.loop import Rank
from ringlet.bench.ranks.torch_ranks import Ringlet
from ringlet.schedule.collectives import REDUCTIONS

pytestmark = emulated_gpu.needs_build


@on(3, "gpu")
@each_way
def test_every_call(rank: int, world: int) -> None:
    """Each collective goes to the GPU and back, with every pair of dtype and operation among the reductions. What the
    engines make of every algorithm and count is tried below Python."""
    checks = Checks()
    pairs = [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if supported(dtype, op)]
    for number, (dtype, op) in enumerate(pairs):
        for collective in REDUCTIONS:
            algorithm = (*ALGORITHMS[collective], "auto")[number % (len(ALGORITHMS[collective]) + 1)]
            in_place = collective in ONLY_IN_PLACE or number % 2 == 0
            case = Case(
                collective, algorithm, dtype, op, world + 1, "gpu", in_place, number % len(roots_of(collective, world))
            )
            run(case, rank, world, checks)
    for collective, count in itertools.product(MOVES, (0, 123, 100_000)):
        for root in roots_of(collective, world):
            in_place = collective in ONLY_IN_PLACE or (collective != "all_to_all" and root % 2 == 0)
            run(Case(collective, "auto", torch.int32, "sum", count, "gpu", in_place, root), rank, world, checks)
    checks.conclude()


@on(5, "gpu")
@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_adds_in_the_order_of_the_host(rank: int, world: int, dtype: torch.dtype) -> None:
    """As the probe of ringlet.reveal sees it."""
    for algorithm in ALGORITHMS["all_reduce"]:
        call, found = functools.partial(ringlet.all_reduce, algorithm=algorithm), []
        for device in (emulated_gpu.DEVICE, "cpu"):
            seen = ringlet.reveal(call, sizes=[4 * world], dtype=dtype, calls=1, device=device)
            (message,) = seen.messages
            assert message.wrong == 0 and not {"the rank", "the call", "the numbers"} & seen.depends.keys(), seen.text()
            found.append([order.text for order in message.layout.orders])
        assert found[0] == found[1], algorithm


@on(3, "gpu")
@each_way
def test_calls_follow_streams(rank: int, world: int) -> None:
    """Calls follow the current stream; asynchronous ones go beside it until it is made to wait."""
    for own in (False, True):
        if own:
            emulated_gpu.use_own_stream()
        tensor = filled(rank + 1.0, 200_000)
        for _ in range(3):
            ringlet.ring_allreduce(tensor, op="avg")
        works = [ringlet.all_reduce(tensor, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        assert tensor.cpu().unique().tolist() == [(world + 1) / 2 * world**2]
        for _ in range(50):
            work = ringlet.all_reduce(tensor.fill_(1.0), async_op=True)
            work.wait(timeout=60)
            assert isinstance(work, ringlet.Work) and work.is_completed()  # as soon as the host has waited
    emulated_gpu.use_default_stream()


@on(3, "gpu")
@each_way
def test_lists(rank: int, world: int) -> None:
    counts = [3000 * q for q in range(world)]
    blocks = [filled(0.0, count) for count in counts]
    ringlet.all_gather(blocks, filled(rank + 1.0, counts[rank]))
    assert [block.cpu().tolist() for block in blocks] == [[q + 1.0] * counts[q] for q in range(world)]
    sent = [filled(10.0 * rank + q, 1 + rank + q) for q in range(world)]
    received = [filled(0.0, 1 + rank + q) for q in range(world)]
    ringlet.all_to_all(received, sent, async_op=True).wait()
    root, own = world - 1, filled(rank + 1.0)  # the others do not see that the root has a list
    equal = [filled(0.0) for _ in range(world)]
    ringlet.gather(equal if rank == root else None, own, root)
    ringlet.scatter(own, equal if rank == root else None, root)
    assert own.cpu().unique().tolist() == [rank + 1.0]
    whole = filled(0.0, 1000 * world)
    ringlet.all_gather(equal if rank == 0 else whole, own)
    gathered = torch.cat([block.cpu() for block in equal]) if rank == 0 else whole.cpu()
    assert gathered.tolist() == [q + 1.0 for q in range(world) for _ in range(1000)]
    assert [block.cpu().tolist() for block in received] == [[10.0 * q + rank] * (1 + rank + q) for q in range(world)]


@on(2, "gpu")
def test_what_is_refused_harms_nothing(rank: int, world: int) -> None:
    here, there = torch.ones(4), filled(1.0, 4)
    group = ringlet.current()
    for call, words in (
        (lambda: ringlet.all_reduce(there, output=here), "must be on one device, got privateuseone:0 and cpu"),
        (lambda: ringlet.all_reduce(here, output=there), "must be on one device, got cpu and privateuseone:0"),
        (lambda: ringlet.send(there, rank), "peer must be a rank"),
        (lambda: ringlet.all_reduce(there, algorithm="no such"), "no such"),
        (lambda: ringlet.all_to_all(there, there), "overlap"),
        (lambda: group.gpu_transport("cpu"), "not a GPU that ringlet supports"),
        (lambda: ringlet.new_group(range(world), max_ctas=-1), "max_ctas must be from 1 to 1024, or 0 for no limit"),
    ):
        with pytest.raises(ringlet.InvalidUsage, match=words):
            call()
    ringlet.all_reduce(there)
    assert there.cpu().tolist() == [2.0] * 4
    assert group.gpu_transport(emulated_gpu.DEVICE) == group.gpu_transport(there.device)
    assert group.gpu_transport(there.device) == "peer memory up to 1048576 bytes, NCCL 2.28.9 beyond"


@on(3, "gpu")
def test_messages(rank: int, world: int) -> None:
    """Messages go on streams like collectives, and between two ranks they meet in order."""
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


def in_registered_memory(rank: int, world: int) -> None:
    with pytest.raises(ringlet.InvalidUsage, match="no registered memory on privateuseone:0: set RINGLET_GPU_HEAP_MIB"):
        ringlet.empty(4, device=emulated_gpu.DEVICE)
    os.environ["RINGLET_GPU_HEAP_MIB"] = "4"
    tensor = ringlet.empty(2, 500, device=emulated_gpu.DEVICE)
    assert tensor.shape == (2, 500) and str(tensor.device) == f"{emulated_gpu.DEVICE}:0"
    assert ringlet.is_registered(tensor) and not ringlet.is_registered(filled(0.0))
    for _ in range(3):
        tensor.copy_(filled(7.0).view(2, 500))
        assert ringlet.ring_allreduce(tensor, op="avg").cpu().unique().tolist() == [7.0]
    with pytest.raises(ringlet.ResourceError, match="has no room"):
        ringlet.empty(1 << 20, dtype=torch.float64, device=emulated_gpu.DEVICE)
    pointer = tensor.data_ptr()
    with emulated_gpu.captured():  # nobody may wait for the device, so this memory is nobody's yet
        del tensor
        meanwhile = ringlet.empty(1000, device=emulated_gpu.DEVICE)
        assert meanwhile.data_ptr() != pointer
    assert ringlet.empty(1000, device=emulated_gpu.DEVICE).data_ptr() == pointer
    del meanwhile


def allocator() -> ctypes.CDLL:
    """The functions that torch.cuda.memory.CUDAPluggableAllocator finds by name."""
    library = ctypes.CDLL(_C.__file__)
    library.ringlet_gpu_heap_allocate.restype = ctypes.c_void_p
    library.ringlet_gpu_heap_allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.ringlet_gpu_heap_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return library


def in_a_pools_memory(rank: int, world: int) -> None:
    """Ordinary tensors that torch lays into memory of the registered heap are read in place."""
    functions, mib = allocator(), 1 << 20
    if rank == 0:
        assert functions.ringlet_gpu_heap_allocate(mib, 0, None) is None  # there is no heap
        assert not _C.has_registered(torch.device(emulated_gpu.DEVICE))
        os.environ["RINGLET_GPU_HEAP_MIB"] = "4"
    ringlet.barrier()
    emulated_gpu.go(rank, world, "peer memory")
    memory = functions.ringlet_gpu_heap_allocate(mib, 0, None)
    tensor = torch.ops.emulated_device.floats_at(memory, mib // 4)
    assert ringlet.is_registered(tensor) and _C.has_registered(torch.device(emulated_gpu.DEVICE))
    tensor.fill_(rank + 1.0)
    before = emulated_gpu.library().emulated_gpu_in_place()
    ringlet.barrier()
    assert ringlet.ring_allreduce(tensor).cpu().unique().tolist() == [world * (world + 1) / 2]
    ringlet.barrier()
    assert emulated_gpu.library().emulated_gpu_in_place() == before + world
    if rank == 0:
        more = [functions.ringlet_gpu_heap_allocate(mib, 0, None) for _ in range(4 - world)]
        assert None not in more and functions.ringlet_gpu_heap_allocate(mib, 0, None) is None  # full
        functions.ringlet_gpu_heap_free(more[0], mib, 0, None)
        assert functions.ringlet_gpu_heap_allocate(mib, 0, None) == more[0]
        with emulated_gpu.captured():  # nobody may wait for the device, so this memory is nobody's yet
            functions.ringlet_gpu_heap_free(more[0], mib, 0, None)
            assert functions.ringlet_gpu_heap_allocate(mib, 0, None) is None
        assert functions.ringlet_gpu_heap_allocate(mib, 0, None) == more[0]
        functions.ringlet_gpu_heap_free(None, 0, 0, None)
    ringlet.barrier()


def test_memory_for_a_pool_of_torchs(own_pool):
    own_pool.values(in_a_pools_memory, 2, join="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_pool_needs_cuda():
    with pytest.raises(ringlet.InvalidUsage, match="torch has no CUDA here"):
        ringlet.registered_pool()


def by_a_table(rank: int, world: int, table: str) -> None:
    """RINGLET_PEER_MEMORY_BYTES is not set, so the rules of the group count."""
    emulated_gpu.go(rank, world, "both")
    os.environ["RINGLET_TABLE"] = table
    ringlet.barrier()
    group = ringlet.new_group(range(world), max_ctas=1)
    for count, natives in ((1000, 0), (3000, world), (1 << 19, 0)):
        before = emulated_gpu.library().emulated_gpu_natives()
        ringlet.barrier()
        tensor = filled(rank + 1.0, count)
        ringlet.all_reduce(tensor, group=group)
        assert tensor.cpu().unique().tolist() == [world * (world + 1) / 2]
        ringlet.barrier()
        assert emulated_gpu.library().emulated_gpu_natives() == before + natives, count
        assert emulated_gpu.library().emulated_gpu_max_ctas() == 1
        ringlet.barrier()


def test_a_table_says_which_way_calls_go(own_pool, tmp_path):
    table = tmp_path / "table"
    table.write_text("all_reduce above 4KiB up to 1MiB world 2 gpus nccl\nall_reduce gpus peers\n")
    own_pool.values(by_a_table, 2, str(table), join="gpu")


def test_registered_memory(own_pool):
    own_pool.values(in_registered_memory, 1, join="gpu")


def measured(rank: int, world: int) -> dict[str, object]:
    """What a rank of `ringlet bench --device` does."""
    emulated_gpu.load()
    library = Ringlet(rank, world, None, "threads", emulated_gpu.DEVICE)
    worker = Rank(library)
    os.environ["RINGLET_GPU_HEAP_MIB"] = "4"
    for memory, dtype, op in (
        ("ordinary", "float32", "sum"),
        ("registered", "float32", "sum"),
        ("ordinary", "bfloat16", "avg"),
    ):
        case = BenchCase("all_reduce", "two_shot", memory, "api", world, 4096, 2048, dtype, op)
        answer = worker.prepare({"case": asdict(case), "seed": 1, "warmup": 2, "check": True})
        assert answer["wrong"] == 0
        assert worker.measure({"samples": 3, "batch": 2})["p50"] > 0
        assert ringlet.is_registered(library.allocate(16, case)) == (memory == "registered")
    library.close()
    return {"version": library.version, "transport": library.transport}


def test_the_benchmark_measures_on_a_device(own_pool):
    told = own_pool.values(measured, 1, join="nothing")[0]
    assert "peer memory" in told["version"] and told["transport"] == emulated_gpu.DEVICE


def test_registered_memory_of_a_gpu_is_set_aside():
    on_gpu = Sweep(device="cuda", memory=("registered",), end_bytes=64 << 20)
    assert int(on_gpu.environment()["RINGLET_GPU_HEAP_MIB"]) >= 2 * 64
    assert replace(on_gpu, memory=("ordinary",)).environment() == Sweep().environment() == {}
