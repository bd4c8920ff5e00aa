"""Algorithms that users write: they run as the built-in ones do, wrong ones are refused on all ranks, and all ranks
have the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from copy import deepcopy as copy_of
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import emulated_gpu
import own_algorithms
import ringlet
from ranks import joined, on
from ringlet.schedule import copy, load, recv, reduce, schedule, send
from ringlet.schedule.data import ScheduleError
from ringlet.schedule.prove import prove
from ringlet.schedule.prove_all import prove_all
from ringlet.schedule.registry import registered

COUNTS = (0, 1, 7, 123_567, 1 << 20)


def same_bits(rank: int, world: int, own: str, built_in: str, memory: str) -> None:
    for count in COUNTS:
        torch.manual_seed(rank)
        made = ringlet.empty(count) if memory == "registered" else torch.empty(count)
        mine = made.normal_()
        expected = mine.clone()
        ringlet.all_reduce(expected, algorithm=built_in)
        ringlet.all_reduce(mine, algorithm=own)
        assert torch.equal(mine, expected), count
    assert ringlet.current().calls()[-1]["algorithm"] == own


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize("own, built_in", [("own_ring", "ring"), ("own_swing", "swing")])
def test_twins_are_step_by_step_the_same(own, built_in, world):
    for hosts in (None, [rank % 2 for rank in range(world)]):
        made, known = (schedule(name, world=world, hosts=hosts) for name in (own, built_in))
        for mine, theirs in zip(made.ranks, known.ranks, strict=True):
            assert [sorted(map(str, round.steps)) for round in mine] == [sorted(map(str, r.steps)) for r in theirs]


def whole_numbers(rank: int, world: int, algorithm: Any, op: str = "sum") -> None:
    for count in COUNTS:
        tensor = torch.full((count,), rank + 1.0)
        ringlet.all_reduce(tensor, op, algorithm=algorithm)
        assert (tensor == sum(range(1, world + 1)) / (world if op == "avg" else 1)).all(), count


@on("everyone")
def test_they_run_as_the_built_in_ones(rank: int, world: int) -> None:
    """By name, and the object itself; in every collective's own way; then asynchronously."""
    for memory in ("ordinary", "registered") if world > 1 else ():
        same_bits(rank, world, "own_ring", "ring", memory)
        if world in (2, 8):
            same_bits(rank, world, "own_swing", "swing", memory)
    whole_numbers(rank, world, own_algorithms.own_ring)
    whole_numbers(rank, world, "own_ring", "avg")
    whole_numbers(rank, world, "own_of_hosts")
    total = torch.full((1000,), rank + 1.0)
    ringlet.all_reduce(total, algorithm="own_ring", async_op=True).wait()
    assert (total == sum(range(1, world + 1))).all()
    for root in range(world):
        tensor = torch.full((1000,), float(rank))
        ringlet.broadcast(tensor, root, algorithm="own_star")
        assert (tensor == root).all()


# ---- what is refused


def refused(rank: int, world: int, name: str) -> str:
    tensor = torch.full((100,), rank + 1.0)
    with pytest.raises(ringlet.InvalidUsage) as raised:
        ringlet.all_reduce(tensor, algorithm=name)
    assert (tensor == rank + 1).all()
    ringlet.all_reduce(tensor, algorithm="own_ring")  # the group lives
    assert (tensor == sum(range(1, world + 1))).all()
    return str(raised.value)


def all_refused(rank: int, world: int) -> dict[str, str]:
    @ringlet.algorithm("all_reduce", name="raises")
    def raises(rank, world):
        raise KeyError("no such thing")

    return {name: refused(rank, world, name) for name in (*own_algorithms.WRONG, "raises")}


@pytest.mark.parametrize("join", ["shared_memory", "mixed"])
def test_wrong_ones_are_refused_on_all_ranks(pool, join):
    said = pool.values(all_refused, 3, join=join)
    assert said == [said[0]] * 3
    assert "KeyError: 'no such thing'" in said[0].pop("raises")
    for name, text in said[0].items():
        assert own_algorithms.WRONG[name] in text
        assert re.search(rf'"{name}" is wrong: {name} all_reduce, world 3.*: rank \d, round \d, chunk \d: ', text), text


def with_functions_of_their_own(rank: int, world: int) -> str:
    def even(rank, world):
        yield [send(p, 0, world) for p in range(world) if p != rank], reduce((rank + 1) % world, 0)

    def odd(rank, world):
        yield send((rank + 1) % world, 0), recv((rank - 1) % world, 1)

    ringlet.algorithm("all_reduce", name="differs")([even, odd][rank % 2])
    return refused(rank, world, "differs")


def test_ranks_with_different_functions_are_told(pool):
    said = pool.values(with_functions_of_their_own, 3)
    assert len(set(said)) == 1, said
    # The first yields no rounds at all, which its rank alone can say.
    assert re.search(
        r'"differs": rank 0 could not make a schedule for this group: test_author.py:\d+: rank 0, round 0', said[0]
    )


def with_chunks_of_their_own(rank: int, world: int) -> str:
    def shifted(by):
        def function(rank, world):
            yield send((rank + 1) % world, by), reduce((rank - 1) % world, by)

        return function

    ringlet.algorithm("all_reduce", name="shifts")(shifted(rank % 2))
    return refused(rank, world, "shifts")


def test_both_functions_are_named(pool):
    said = pool.values(with_chunks_of_their_own, 3, join="mixed")
    assert len(set(said)) == 1, said
    pattern = r"differs between ranks: rank 0 has that of test_author.py:\d+, digest \w{12}; rank 1 has that of "
    assert re.search(pattern, said[0]), said[0]


def without_it(rank: int, world: int) -> str:
    if rank:
        ringlet.algorithm("all_reduce", name="only_some")(own_algorithms.own_ring.function)
    with pytest.raises((ringlet.InvalidUsage, ringlet.PeerLost)) as raised:
        ringlet.all_reduce(torch.ones(1), algorithm="only_some")
        ringlet.barrier()
    return str(raised.value)


def test_a_rank_that_lacks_it_says_so(pool):
    said = pool.values(without_it, 2)
    assert "all_reduce: algorithm must be one of auto, ring" in said[0] and 'got "only_some"' in said[0]


@pytest.mark.parametrize(
    "collective, options, words",
    [
        ("all_reduces", {}, "the collective must be one of"),
        ("all_reduce", {"name": "auto"}, "none of auto, none, nccl"),
        ("all_reduce", {"name": "two words"}, "the name must be a letter"),
        ("all_reduce", {"name": 3}, "the name must be a letter"),
        ("all_reduce", {"name": "ring"}, 'has a built-in algorithm "ring"'),
        ("all_reduce", {"name": "m", "order": "up"}, "order must be one of none, along, across, got 'up'"),
        ("all_gather", {"name": "m", "parts": 3}, "leave parts= out"),
        ("broadcast", {"name": "m"}, "has a root"),
    ],
)
def test_what_cannot_be_an_algorithm(collective, options, words):
    with pytest.raises(ringlet.InvalidUsage, match=re.escape(words)):
        ringlet.algorithm(collective, **options)(lambda rank, world: ())


def test_an_order_is_not_for_a_function_that_knows_the_hosts():
    with pytest.raises(ringlet.InvalidUsage, match="order= is for a function without the parameter hosts"):
        ringlet.algorithm("all_reduce", name="m", order="along")(lambda rank, world, hosts: ())


def test_a_decorator_without_its_collective_is_refused():
    with pytest.raises(
        ringlet.InvalidUsage, match=r'the collective is missing: write @ringlet.algorithm."all_reduce".'
    ):

        @ringlet.algorithm
        def mine(rank, world):
            yield ()


def test_a_function_that_does_not_end_is_told():
    def rounds(rank, world):
        while True:
            yield []

    def steps(rank, world):
        yield itertools.repeat(send((rank + 1) % world, 0))

    for function, what in ((rounds, "more than 32768 rounds"), (steps, "a round of more than 1048576 steps")):
        made = ringlet.algorithm("all_reduce", name="endless", parts=1)(function)
        with pytest.raises(ScheduleError, match=f"yields {what}: does it end"):
            made.schedule(2)


async def later(rank, world):
    return ()


@pytest.mark.parametrize(
    "function, parts, words",
    [
        (lambda rank, world: 5, 1, "rank 0, round 0: returns 5, but must yield rounds"),
        (lambda rank, world: send(1 - rank, 0), 1, "rank 0, round 0: returns Step.*, but must yield rounds"),
        (later, 1, "returns <coroutine .*, but must yield rounds"),
        (lambda rank, world: (), 2.0, "parts must be a whole number, got 2.0"),
    ],
)
def test_a_function_that_yields_no_rounds_is_told(function, parts, words):
    made = ringlet.algorithm("all_reduce", name="returns", parts=parts)(function)
    with pytest.raises(ScheduleError, match=f"^returns all_reduce, world 2: .*{words}"):
        made.schedule(2)
    with pytest.raises(ringlet.InvalidUsage, match="world and root must be whole numbers"):
        made.schedule("2")


def test_a_function_may_ask_for_its_place_only():
    with pytest.raises(ringlet.InvalidUsage, match="has a parameter 'size'; it may have rank, world, root, hosts"):
        ringlet.algorithm("all_reduce", name="m")(lambda rank, size: ())


# ---- ways to name it


def by_the_table(rank: int, world: int) -> None:
    """`auto` means it where the group's table says so, from above 4 KiB on."""
    group = ringlet.current()
    for count in (16, 4096):
        tensor = torch.full((count,), rank + 1.0)
        ringlet.all_reduce(tensor)
        assert (tensor == sum(range(1, world + 1))).all()
        assert (group.calls()[-1]["algorithm"] == "own_ring") == (count == 4096)
    said = ringlet.empty(1 << 20).fill_(rank + 1.0)
    ringlet.all_reduce(said)
    assert (said == sum(range(1, world + 1))).all()


@pytest.fixture
def table(tmp_path, request):
    """The path of a table that has one line."""
    (tmp_path / "table").write_text(f"{request.param}\n")
    return str(tmp_path / "table")


def with_table(line: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("table", [line], indirect=True, ids=["table"])


@on(3, "nothing")
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "mixed"])
@with_table("all_reduce above 4KiB own_ring")
def test_a_table_may_name_it(rank: int, world: int, path: str, transport: str, table: str) -> None:
    with (
        mock.patch.dict(os.environ, RINGLET_TABLE=table),
        joined(rank, world, dist.FileStore(path, world), transport, timeout=60),
    ):
        by_the_table(rank, world)


@on(2, "dist:ringlet", "dist:ringlet@mixed")
def test_a_process_group_and_the_reducer_take_it(rank: int, world: int) -> None:
    options = ringlet.BackendOptions(algorithm="own_ring")
    group = dist.new_group(pg_options=options)
    tensor = torch.full((5000,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert (tensor == sum(range(1, world + 1))).all()
    model = torch.nn.Linear(8, 8)
    reducer = ringlet.GradientReducer(model, algorithm="own_ring")
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    assert (model.weight.grad == (world + 1) / 2).all()
    reducer.remove()


@pytest.mark.parametrize("kept", [numpy.array([1, 2]), [torch.tensor([1, 2])], {"steps": numpy.array([0.5, 1])}])
def test_the_newest_function_of_a_name_counts_whatever_it_refers_to(kept):
    """Also if values that it refers to cannot be compared."""

    def register(values, default):
        def refers(rank, world, note=default):
            yield send(0, values is note, 1)

        return ringlet.algorithm("all_reduce", name="refers")(refers)

    first = register(kept, 0)
    assert register(kept, 0) is first
    for values, default in ((copy_of(kept), 0), (kept, copy_of(kept)), (kept, 0)):
        newer = register(values, default)
        assert newer is not first and registered("refers") == [newer]


def test_methods_of_two_objects_are_two_functions():
    class Shifted:
        def __init__(self, by):
            self.by = by

        def rounds(self, rank, world):
            yield send((rank + self.by) % world, 0), reduce((rank - self.by) % world, 0)

    shifted = [Shifted(1), Shifted(2)]
    first, again, second = (ringlet.algorithm("all_reduce", name="shifted")(shifted[i].rounds) for i in (0, 0, 1))
    assert first is again and second is not first
    assert schedule("shifted", world=5) == second.schedule(5) != first.schedule(5)


HELPED = """
import ringlet
from ringlet.schedule import reduce, send

FIRST = 0

def chunks(world):
    return {"chunk": FIRST, "count": world}

def twice(depth):
    return twice(depth - 1) if depth else 1

@ringlet.algorithm("all_reduce", name="helped")
def helped(rank, world):
    yield [twice(1) and verb(p, **chunks(world)) for verb in (send, reduce) for p in range(world) if p != rank]
"""


@pytest.mark.parametrize(
    "old, new", [("FIRST = 0", "FIRST = 1"), ("else 1", "else 2"), ('"count": world', '"count": 1')]
)
def test_a_function_whose_helpers_change_is_another(tmp_path, old, new):
    """Its own code is the same: what it calls, or a number that this names, has changed."""
    path = tmp_path / "helped.py"
    path.write_text(HELPED)
    (first,) = load(path)
    path.write_text(HELPED + "# a comment\n")
    assert load(path) == [first]
    path.write_text(HELPED.replace(old, new))
    (second,) = load(path)
    assert second is not first and registered("helped") == [second]


def test_helpers_may_all_call_each_other(tmp_path):
    """Each counts once: their paths are too many to follow."""
    calls = " + ".join(f"f{i}(n - 1)" for i in range(30))
    helpers = "".join(f"def f{i}(n):\n    return n and {calls}\n" for i in range(30))
    path = tmp_path / "many.py"
    path.write_text(helpers + HELPED.replace("helped", "many").replace("twice(1)", "not f0(0)"))
    (made,) = load(path)
    assert prove(made.schedule(3)).rounds == 1


def test_a_file_is_run_once_and_again_when_it_changes(tmp_path):
    path = tmp_path / "mine.py"
    text = (
        "import ringlet\nfrom ringlet.schedule import reduce, send\n\n"
        '@ringlet.algorithm("all_reduce", name="of_a_file")\ndef f(rank, world):\n'
        "    yield [*(send(p, 0, world) for p in range(world) if p != rank),\n"
        "           *(reduce(p, 0, world) for p in range(world) if p != rank)]\n"
    )
    path.write_text(text)
    (made,) = load(path)
    assert (made.name, made.origin) == ("of_a_file", "mine.py:4")
    assert load(path) == [made]
    assert prove(schedule("of_a_file", world=5)) == prove(made.schedule(5))
    assert [p.world for p in prove_all([1, 2, 9], algorithms=["of_a_file"])] == [1, 2, 9]
    path.write_text(text.replace("of_a_file", "of_another"))
    assert [one.name for one in load(path)] == ["of_another"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "the file makes no algorithm"),
        ("def", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_without_an_algorithm_is_refused(tmp_path, text, words):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(ringlet.InvalidUsage, match=f"wrong.py: .*{words}"):
        load(path)
    with pytest.raises(ringlet.InvalidUsage, match="cannot read the file"):
        load(tmp_path / "none.py")


# ---- on the emulated GPU


@emulated_gpu.needs_build
@on((3, 4), "gpu")
@emulated_gpu.each_way
def test_tensors_on_a_gpu(rank: int, world: int) -> None:
    for count in (1, 1000, 200_000):
        for own, built_in in [("own_ring", "ring"), ("own_swing", "swing")][: 2 if world == 4 else 1]:
            torch.manual_seed(rank)
            mine = torch.randn(count).to(emulated_gpu.DEVICE)
            expected = mine.clone()
            ringlet.all_reduce(expected, algorithm=built_in)
            ringlet.all_reduce(mine, algorithm=own)
            assert torch.equal(mine.cpu(), expected.cpu()), (own, count)
    with pytest.raises(ringlet.InvalidUsage, match="is wrong"):
        ringlet.all_reduce(mine, algorithm="deadlock")


# --- what a proved schedule may still do wrong in memory -------------------------------------------------------------


@on(3, "shared_memory", "tcp")
def test_blocks_of_different_sizes_stay_in_their_own_places(rank: int, world: int) -> None:
    refused = "keeps blocks in the places of other blocks"
    # In the last one rank 2's own blocks are all of one size.
    for sizes in (
        [[4] * 3] * 3,
        [[1, 2, 4], [1, 1, 1], [1, 1, 1]],
        [[2] * 3, [2, 2, 2], [5, 5, 5]],
        [[3, 1, 3], *[[3] * 3] * 2],
    ):
        sent = [torch.full((size,), 10.0 * rank + q) for q, size in enumerate(sizes[rank])]
        taken = [torch.full((sizes[q][rank],), -1.0) for q in range(world)]
        even = len({size for row in sizes for size in row}) == 1
        with contextlib.nullcontext() if even else pytest.raises(ringlet.InvalidUsage, match=refused):
            ringlet.all_to_all(taken, sent, algorithm="own_relay")
        for q in range(world):
            assert taken[q].eq(10.0 * q + rank if even else -1.0).all(), (sizes, q)


@on(3, "shared_memory", "threads")
def test_ranks_do_not_wait_in_a_circle_in_place(rank: int, world: int) -> None:
    for tensor in (torch.empty(1000), torch.empty(1 << 16), ringlet.empty(1 << 16)):
        tensor.fill_(rank + 1.0)
        ringlet.all_reduce(tensor, algorithm="own_circle")
        assert tensor.eq(6.0).all()


@on(3)
def test_a_circle_that_no_buffer_opens_is_refused_by_all(rank: int, world: int) -> None:
    for _ in range(3):
        with pytest.raises(ringlet.InvalidUsage, match="would wait in a circle"):
            ringlet.all_reduce(torch.ones(10), algorithm="own_staged_circle")
    tensor = torch.full((10,), rank + 1.0)
    for algorithm in ("auto", "own_ring"):
        ringlet.all_reduce(tensor, algorithm=algorithm)
    assert tensor.eq(18.0).all()


def test_a_divided_chunk_is_not_copied_to_another_place():
    def shifts(rank: int, world: int) -> Any:
        yield send(1 - rank, 0, 2), reduce(1 - rank, 0, 2)
        yield copy(0, 1)

    own = ringlet.algorithm("all_reduce", name="shifts", parts=2)(shifts)
    with pytest.raises(ScheduleError, match="a chunk of all_reduce keeps its index"):
        own.schedule(2).prove()


@on(3, "nothing")
@with_table("all_reduce world 4 only_four")
def test_a_rule_for_another_world_does_not_stand_in_the_way(rank: int, world: int, path: str, table: str) -> None:
    @ringlet.algorithm("all_reduce", name="only_four")
    def only_four(rank: int, world: int) -> Any:
        if world != 4:
            raise NotImplementedError("four ranks")
        others = [peer for peer in range(world) if peer != rank]
        yield [*(send(peer, 0, world) for peer in others), *(reduce(peer, 0, world) for peer in others)]

    store = dist.FileStore(path, world)
    with mock.patch.dict(os.environ, RINGLET_TABLE=table), joined(rank, world, store, "auto", timeout=20):
        tensor = torch.full((1000,), rank + 1.0)
        ringlet.all_reduce(tensor)
        assert tensor.eq(6.0).all()


@on(3, "nothing")
@with_table("all_gather own_gather")
def test_uneven_blocks_may_be_the_first_call(rank: int, world: int, path: str, table: str) -> None:
    """The first call that needs the schedules has uneven blocks, so it asks them for lengths at once."""
    with mock.patch.dict(os.environ, RINGLET_TABLE=table):
        dist.init_process_group("ringlet", store=dist.FileStore(path, world), rank=rank, world_size=world)
    try:
        for count in range(2):
            taken = [torch.empty(q + count) for q in range(world)]
            dist.all_gather(taken, torch.full((rank + count,), float(rank)))
            assert all(taken[q].eq(q).all() for q in range(world))
    finally:
        dist.destroy_process_group()


@on(2, "nothing")
@with_table("all_reduce of_rank_1")
def test_a_table_that_rank_0_cannot_read_is_told_to_all(rank: int, world: int, path: str, table: str) -> None:
    if rank == 1:
        ringlet.algorithm("all_reduce", name="of_rank_1", parts=1)(own_algorithms.own_ring.function)
    refused = pytest.raises(ringlet.InvalidUsage, match="line 1: all_reduce: algorithm must be one of")
    with mock.patch.dict(os.environ, RINGLET_TABLE=table), refused:
        ringlet.init(rank, world, dist.FileStore(path, world), timeout=30)
