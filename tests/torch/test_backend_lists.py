"""torch.distributed on ringlet: lists, uneven blocks, coalesced calls, sparse sums; what gloo has and what it lacks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on
from refusals import refused


def block(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 7 + 10 * rank).to(dtype)


LAYOUTS = {
    "channels_last": lambda tensor: tensor.to(memory_format=torch.channels_last),
    "channels_last_3d": lambda tensor: tensor.unsqueeze(2).to(memory_format=torch.channels_last_3d).squeeze(2),
    "transposed": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "reversed": lambda tensor: tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "sliced": lambda tensor: torch.cat([tensor, tensor], 3)[..., : tensor.size(3)],
}


@on((2, 3), "dist:ringlet")
def test_layouts_of_one_rank_alone(rank: int, world: int) -> None:
    """A tensor's values are its elements by index, however they lie in memory on this rank and on others."""
    odd, root = 1, 0
    for scale in (1, 40):  # one segment and many
        shape = (2, 3, 4 * scale, 5 * scale)
        each = [torch.arange(120.0 * scale**2).view(shape) % 50 + q for q in range(world)]
        total, rows = sum(each), torch.cat(each)
        for name, lay in LAYOUTS.items():
            for odds in ({odd}, {root}, set(range(world))):
                other = lay if rank in odds else torch.clone

                def mine(tensor: torch.Tensor = each[rank], other=other) -> torch.Tensor:
                    return other(tensor.clone())

                case = (scale, name, odds)
                dist.all_reduce(x := mine())
                assert torch.equal(x, total), case
                dist.all_reduce_coalesced(several := [mine(), mine()])
                assert all(torch.equal(x, total) for x in several), case
                dist.broadcast(x := mine(), root)
                assert torch.equal(x, each[root]), case
                dist.reduce(x := mine(), root)
                assert rank != root or torch.equal(x, total), case
                gathered = [other(torch.empty(shape)) for _ in range(world)]
                dist.all_gather(gathered, mine())
                assert all(map(torch.equal, gathered, each)), case
                dist.all_gather_into_tensor(x := other(torch.empty(rows.shape)), mine())
                assert torch.equal(x, rows), case
                dist.gather(mine(), gathered if rank == root else None, root)
                assert rank != root or all(map(torch.equal, gathered, each)), case
                dist.scatter(x := other(torch.empty(shape)), [mine(q) for q in each] if rank == root else None, root)
                assert torch.equal(x, each[rank]), case
                dist.reduce_scatter(x := other(torch.empty(shape)), [mine(q) for q in each])
                assert torch.equal(x, world * each[rank]), case
                dist.reduce_scatter_tensor(x := other(torch.empty(shape)), mine(rows))
                assert torch.equal(x, world * each[rank]), case
                dist.all_to_all(gathered, [mine(q) for q in each])
                assert all(torch.equal(x, each[rank]) for x in gathered), case


@on((2, 3), "dist:ringlet")
def test_coalesced_calls(rank: int, world: int) -> None:
    counts = (3, 0, 100_000)
    tensors = [torch.full((count,), 1.0 + rank) for count in counts]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((tensor == world * (world + 1) / 2).all() for tensor in tensors)
    lists = [[torch.empty(q), torch.empty(70_001 * q, dtype=torch.int16)] for q in range(world)]
    inputs = [block(rank, rank), block(rank, 70_001 * rank, torch.int16)]
    dist.group.WORLD.allgather_coalesced(lists, inputs).wait()
    for q in range(world):
        assert torch.equal(lists[q][0], block(q, q)) and torch.equal(lists[q][1], block(q, 70_001 * q, torch.int16)), q
    gathered = [torch.empty(world * count) for count in counts]
    parts = [torch.empty(count) for count in counts]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor, output in zip(tensors, gathered, strict=True):
            dist.group.WORLD._allgather_base(output, tensor)
        for tensor, part in zip(gathered, parts, strict=True):
            dist.group.WORLD._reduce_scatter_base(part, tensor)
    for output, part in zip(gathered, parts, strict=True):
        assert (output == world * (world + 1) / 2).all() and (part == world * world * (world + 1) / 2).all()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((5,), float(rank)), (rank + 1) % world)
        dist.irecv(got := torch.empty(5), (rank - 1) % world)
    manager.wait()
    assert got.tolist() == [(rank - 1) % world] * 5


@on((2, 3), "dist:ringlet")
def test_sparse_sums(rank: int, world: int) -> None:
    for entries in (0, 3):  # of rank 0; the others have more
        count = entries + rank
        indices = torch.arange(count).repeat(2, 1) + rank
        values = torch.ones(count, 4) * (rank + 1)
        tensor = torch.sparse_coo_tensor(indices, values, (20, 20, 4), check_invariants=True)
        wanted = torch.zeros(20, 20, 4)
        for q in range(world):
            for i in range(q, entries + 2 * q):
                wanted[i, i] += q + 1
        for asynchronous in (False, True):
            summed = tensor.clone()
            work = dist.all_reduce(summed, async_op=asynchronous)
            if asynchronous:
                work.wait()
            assert summed.is_sparse and torch.equal(summed.to_dense(), wanted)
    refused("operation other than sum", dist.all_reduce, tensor, dist.ReduceOp.MAX)


@on((2, 3), "dist:ringlet")
def test_parts_of_a_group(rank: int, world: int) -> None:
    part = dist.group.WORLD.split_group([0, world - 1], group_name=f"part of {world}")
    tensor = torch.ones(5)
    if part is not None and rank in (0, world - 1):
        part.allreduce([tensor]).wait()
        assert tensor.tolist() == [2] * 5
        assert part._get_backend(torch.device("cpu")).max_ctas == 0
    few = dist.new_group(pg_options=ringlet.BackendOptions(max_ctas=3))._get_backend(torch.device("cpu"))
    assert few.max_ctas == few.options.max_ctas == 3
    with pytest.raises(ringlet.InvalidUsage, match="max_ctas must be from 1 to 1024"):
        few.max_ctas = 1025
    dist.all_reduce(tensor)


@on((2, 3), "dist:ringlet")
def test_blocks_that_do_not_fit_are_told_to_all(rank: int, world: int) -> None:
    """Rank 0 sends more to rank 1 than that expects: every rank is told, nobody's output is touched."""
    outputs = [torch.full((2,), -1.0) for _ in range(world)]
    inputs = [torch.ones(3 if (rank, q) == (0, 1) else 2) for q in range(world)]
    refused("rank 0 sends 3 elements to rank 1, which expects 2", dist.all_to_all, outputs, inputs)
    assert rank != 1 or torch.cat(outputs).unique().tolist() == [-1]


@on("two")
def test_coalesced_gathers_that_cannot_be(rank: int, world: int) -> None:
    first, second = torch.full((2,), rank + 1.0), torch.full((2,), 10.0 * (rank + 1))
    outputs = [[torch.empty(2), torch.empty(2)] for _ in range(world)]
    outputs[1 - rank][0] = second
    group = dist.group.WORLD
    with pytest.raises(ringlet.InvalidUsage, match="must not overlap the input of a later one"):
        group.allgather_coalesced(outputs, [first, second]).wait()
    assert second.tolist() == [10.0 * (rank + 1)] * 2
    with pytest.raises(ringlet.InvalidUsage, match="at least one tensor"):
        group._get_backend(torch.device("cpu")).allgather_coalesced([[] for _ in range(world)], [])
