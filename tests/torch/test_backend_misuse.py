"""Wrong use of torch.distributed on ringlet: a clear error before anything moves, or what gloo does. And the names."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on
from refusals import error_of, refused

LIMIT = timedelta(seconds=20)


def start(backend: str, store: dist.Store, rank: int, world: int, timeout: timedelta = LIMIT) -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def total() -> float:
    """The group still works: how many ranks took part."""
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    (value,) = tensor.unique().tolist()
    return value


# --- the start and the end of a group -------------------------------------------------------------------------------


@on(2, "nothing")
def test_wrong_starts(rank: int, world: int, folder: str) -> None:
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=r"(?i)unknown.*ringlets"):
        start("ringlets", dist.FileStore(f"{folder}/name", world), rank, world)
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        start("ringlet", "a store's name", rank, world)
    # Each rank has a store of its own: nobody else ever comes.
    with pytest.raises(
        ringlet.Timeout, match=rf"was not joined by rank\(s\) {1 - rank} in time: they may have failed, or"
    ):
        start("ringlet", dist.HashStore(), rank, world, timedelta(seconds=0.5))
    assert not dist.is_initialized()
    store = dist.FileStore(f"{folder}/good", world)
    start("ringlet", store, rank, world)
    with pytest.raises(ValueError, match="default process group twice"):
        start("ringlet", store, rank, world)
    assert total() == world
    dist.destroy_process_group()


@on(2, "nothing")
def test_use_after_destroy(rank: int, world: int, path: str) -> None:
    start("ringlet", dist.FileStore(path, world), rank, world)
    group, other = dist.group.WORLD, dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    assert work.wait() and tensor.unique().tolist() == [world], "what was issued before the end is carried out"
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.all_reduce(tensor)
    for call in (
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.all_reduce(tensor, group=other),
        lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        lambda: group.broadcast(tensor, 0).wait(),
        lambda: backend.barrier(dist.BarrierOptions()).wait(),
        lambda: group.send([tensor], 1 - rank, 0).wait(),
    ):
        refused("on a group that was closed", call)
    assert tensor.unique().tolist() == [world]


# --- tensors --------------------------------------------------------------------------------------------------------


def root_of(options: object) -> object:
    options.rootRank = 2**32 + 1  # type: ignore[attr-defined]
    return options


@on("two")
def test_wrong_tensors_are_refused_and_the_group_goes_on(rank: int, world: int) -> None:
    block, meta = torch.ones(3), torch.empty(3, device="meta")
    several, full = torch.empty(3 * world), [torch.empty(3) for _ in range(world)]
    cases = (
        (
            lambda: dist.group.WORLD.broadcast([block], root_of(dist.BroadcastOptions())),
            f"root must be a rank from 0 to {world - 1}, got 4294967297",
        ),
        (
            lambda: dist.group.WORLD.reduce([block], root_of(dist.ReduceOptions())),
            f"root must be a rank from 0 to {world - 1}, got 4294967297",
        ),
        (lambda: dist.all_to_all_single(torch.empty(2, 2), torch.ones(2, 2).t()), "not contiguous"),
        (lambda: dist.all_gather([meta] * world, block), "meta"),
        (lambda: dist.reduce_scatter(block, [meta] * world), "meta"),
        (
            lambda: dist.all_gather_into_tensor(several.long(), block),
            "all_gather: all tensors of a call must have one dtype",
        ),
        (lambda: dist.all_gather_into_tensor(several[1:], block), "all_gather: the output tensor must have"),
        (lambda: dist.reduce_scatter_tensor(block, several[1:]), "reduce_scatter: the input tensor must"),
        (lambda: dist.all_reduce(block, dist.ReduceOp.BOR), "bor is not defined for float32"),
        (lambda: dist.group.WORLD.allgather([full], [block.int()]), "all tensors of a call must have one dtype"),
        (lambda: dist.all_to_all(full[1:], full), "a list must have one entry for each"),
        (lambda: dist.all_to_all_single(several.clone(), several, [2] * world, [1] * world), "add up to"),
        (lambda: dist.all_to_all_single(several, several, [3] * world, [3] * world), "overlap"),
        (lambda: dist.group.WORLD.allreduce_coalesced([several, several[:1]]), "overlap"),
    )
    told = [(message, error_of(call)) for call, message in cases]
    wrong = [f"{message}: {text}" for message, text in told if not re.search(f"^InvalidUsage: .*{message}", text)]
    assert not wrong, "\n".join(wrong)
    assert total() == world


@on("two")
def test_lazy_clones_are_copied_first(rank: int, world: int) -> None:
    """Lazy clones: torch copies them when something writes."""
    sent, received = torch.ones(3), torch.zeros(3)
    total, copy = torch._lazy_clone(sent), torch._lazy_clone(received)
    dist.all_reduce(total)
    dist.broadcast(copy if rank else sent, 0)
    assert total.tolist() == [world] * 3 and sent.tolist() == [1] * 3
    assert received.tolist() == [0] * 3 and (rank == 0 or copy.tolist() == [1] * 3)


@on(2, "dist:ringlet", "dist:gloo")
def test_what_torch_refuses_it_refuses_here(rank: int, world: int) -> None:
    for call in (
        lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64).conj()),
        lambda: dist.all_reduce(None),
        lambda: dist.all_gather([torch.empty(3)] * world, torch.ones(3, dtype=torch.int64)),
    ):
        with pytest.raises((NotImplementedError, RuntimeError, TypeError, ValueError)):
            call()
    dist.all_reduce(torch.empty(3, device="meta"))  # torch's own: shapes without data pass through
    assert total() == world


# --- names ----------------------------------------------------------------------------------------------------------


def names(rank: int, world: int, store: str, name: str) -> None:
    start(name, dist.FileStore(store, world), rank, world)
    on_cpu = type(dist.group.WORLD._get_backend(torch.device("cpu")))
    assert (on_cpu is ringlet._C.Backend) == ("cpu:ringlet" in name)
    assert dist.get_backend() == name and total() == world
    dist.barrier()
    for other in ("gloo", "ringlet"):  # a group of another backend beside it
        group = dist.new_group(backend=other)
        tensor = torch.full((10,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert dist.get_backend(group) == other and tensor.tolist() == [world * (world - 1) / 2] * 10
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["cpu:ringlet", "cpu:ringlet,cuda:gloo", "cpu:gloo,cuda:ringlet"])
def test_names_for_devices(pool, tmp_path, name):
    pool.values(names, 2, str(tmp_path / "store"), name, join="nothing")


def test_without_nccl_its_name_is_refused(pool, tmp_path):
    if dist.is_nccl_available():
        pytest.skip("this torch has NCCL")
    for outcome in pool.run(names, 2, str(tmp_path / "store"), "cpu:ringlet,cuda:nccl", join="nothing"):
        assert outcome.kind == "RuntimeError" and "NCCL" in outcome.message


# --- batches, modes and options --------------------------------------------------------------------------------------


def batch_of(tensor: torch.Tensor, got: torch.Tensor, peer: int) -> list[dist.P2POp]:
    return [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, got, peer)]


@on("two")
def test_a_refused_batch_leaves_the_group_usable(rank: int, world: int) -> None:
    peer, got = 1 - rank, torch.zeros(2)
    refused("contiguous", dist.batch_isend_irecv, batch_of(torch.ones(3, 2).t(), torch.empty(2, 3), peer))
    assert total() == world
    for work in dist.batch_isend_irecv(batch_of(torch.full((2,), rank + 1.0), got, peer)):
        work.wait()
    assert got.tolist() == [peer + 1.0] * 2


@on("two")
def test_calls_after_a_batch_that_failed_fail(rank: int, world: int) -> None:
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    with pytest.raises(ringlet.Error, match="aborted"):
        dist.batch_isend_irecv(batch_of(torch.ones(2), torch.ones(2), 1 - rank))
    with pytest.raises(ringlet.Error, match="aborted"):
        dist.all_reduce(torch.ones(2))


@on("two")
def test_strided_tensors_in_inference_mode(rank: int, world: int) -> None:
    seen = []
    with torch.inference_mode():
        for strided in (True, rank == 1):
            for asynchronous in (True, False):
                tensor = torch.ones(4, 4)[:, :3] if strided else torch.ones(4, 3)
                before = dist.all_reduce(torch.ones(1 << 20), async_op=True)  # the next call waits behind it
                work = dist.all_reduce(tensor, async_op=asynchronous)
                before.wait()
                if work is not None:
                    work.wait()
                seen.append(tensor.unique().tolist())
    ordinary = [torch.ones(4, 4, requires_grad=True).detach()[:, :3] for _ in range(2)]
    dist.all_reduce(ordinary[0], async_op=True).wait()
    assert not ordinary[0].is_inference()
    assert seen == [[2.0]] * 4


@on("two")
def test_outputs_that_torch_would_not_write_are_refused(rank: int, world: int) -> None:
    """torch lets nobody write such a tensor outside of the mode."""
    with torch.inference_mode():
        tensor = torch.ones(4, 4)
    for asynchronous in (True, False):
        refused("was made in inference mode", dist.all_reduce, tensor[:, :3], async_op=asynchronous)
    assert total() == 2.0


@on("two")
def test_options_choose_the_transport_of_a_part(rank: int, world: int) -> None:
    cpu, group = torch.device("cpu"), dist.group.WORLD
    part = group.split_group([0, 1], opts=ringlet.BackendOptions(transport="tcp"))
    over_tcp = dist.new_group(pg_options=ringlet.BackendOptions(transport="tcp"))._get_backend(cpu)
    assert [part._get_backend(cpu).transport, over_tcp.transport, over_tcp.options.transport] == ["tcp"] * 3
