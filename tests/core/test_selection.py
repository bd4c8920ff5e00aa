"""What `auto` means: the table's syntax, whose table counts, and that all ranks go by it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import free_ports, joined, on, on_host
from ringlet import _C

MEDIA = ("registered", "staged", "hosts", "apart", "peers", "nccl")


def chosen(table: str, nbytes: int = 1 << 20, world: int = 4, medium: str = "staged") -> str:
    return _C.chosen("all_reduce", nbytes, world, medium, table)


# ---- the text


def test_sizes_end_where_they_say():
    table = "all_reduce above 4KiB up to 64KiB star"
    usual = chosen("")
    assert [chosen(table, size) == "star" for size in (4096, 4097, 65536, 65537)] == [False, True, True, False]
    assert chosen("", 1 << 20) == usual != "star"
    for text, size in (("100B", 100), ("3KiB", 3072), ("5MiB", 5 << 20), ("2GiB", 2 << 30)):
        assert (
            chosen(f"all_reduce up to {text} star", size) == "star" != chosen(f"all_reduce up to {text} star", size + 1)
        )


@pytest.mark.parametrize(
    "words, worlds", [("world 4", [4]), ("world 2-4", [2, 3, 4]), ("world 5-", [5, 6, 7, 8]), ("", range(2, 9))]
)
def test_worlds(words, worlds):
    assert [n for n in range(2, 9) if chosen(f"all_reduce {words} star", world=n) == "star"] == list(worlds)


@pytest.mark.parametrize(
    "word, media",
    [
        ("memory", {"registered", "staged"}),
        ("registered", {"registered"}),
        ("staged", {"staged"}),
        ("network", {"hosts", "apart"}),
        ("hosts", {"hosts"}),
        ("apart", {"apart"}),
        ("peers", {"peers"}),
        ("nccl", {"nccl"}),
        ("", set(MEDIA)),
    ],
)
def test_media(word, media):
    assert {medium for medium in MEDIA if chosen(f"all_reduce {word} star", medium=medium) == "star"} == media


def test_the_first_rule_that_fits_counts_and_the_built_in_ones_come_last():
    table = "# nothing\n\n  all_reduce\tup to 1KiB\tring # why\r\nall_reduce up to 1MiB star\nbroadcast star"
    assert [chosen(table, size) for size in (512, 2048)] == ["ring", "star"]
    assert chosen(table, 2 << 20) == chosen("", 2 << 20)


def test_conditions_stand_in_any_order():
    for table in ("all_reduce world 4 staged up to 2MiB ring", "all_reduce up to 2MiB world 4 staged ring"):
        assert chosen(table) == "ring"


def test_the_built_in_rules_are_a_table_that_covers_everything():
    text = _C.built_in_rules()
    for _, collective, _ in ringlet.schedule.algorithms():
        for medium in MEDIA:
            for world in (1, 2, 3, 4, 5, 17):
                for size in (0, 1, 4096, 1 << 16, 1 << 22, 1 << 34):
                    choice = _C.chosen(collective, size, world, medium)
                    assert choice == _C.chosen(collective, size, world, medium, text)
    assert chosen("", 4096, medium="apart") == "butterfly" and chosen("", 1 << 20, medium="hosts") == "hierarchical"
    assert chosen("", 1 << 20, 2) == "one_shot" and chosen("", 1 << 20, 2, "registered") == "two_shot"


@pytest.mark.parametrize(
    "line, said",
    [
        ("all_reduced ring", '"all_reduced" is not a collective: give one of all_reduce, reduce_scatter'),
        ("all_reduce wring", "all_reduce: algorithm must be one of ring, butterfly"),
        ("all_reduce wring", 'hierarchical, got "wring"'),
        ("all_reduce auto", 'got "auto"'),
        ("all_reduce", "the line ends, but an algorithm must follow"),
        ("all_reduce up to 4K ring", '"4K" is not a size: give a whole number with B, KiB, MiB or GiB'),
        ("all_reduce up to -4KiB ring", "is not a size"),
        ("all_reduce up to 99999999999GiB ring", "is not a size"),
        ("all_reduce up 4KiB ring", '"up" must be followed by "to"'),
        ("all_reduce above 4KiB up to 4KiB ring", "the size range is empty: its lower limit is above its upper limit"),
        ("all_reduce up to 4KiB up to 8KiB ring", '"up" is given twice'),
        ("all_reduce staged network ring", '"network": a rule has one kind of memory'),
        ("all_reduce world 4-2 ring", '"4-2" is not a world size'),
        ("all_reduce world 0 ring", '"0" is not a world size'),
        ("all_reduce world many ring", '"many" is not a world size'),
        ("all_reduce tcp ring", '"tcp" is not a condition: give one of above SIZE'),
        ("all_reduce gpus ring", "a rule for gpus ends with the way that calls go, peers or nccl"),
        ("all_to_all up to 1MiB gpus nccl", "no rank knows how long the blocks of the others are"),
        ("all_reduce gpus peers peers", '"peers": a rule has one kind of memory or transport'),
        ("tuned", "the line ends, but a name must follow"),
        ("tuned spins 4KiB", '"spins" cannot be tuned: give one of small_bytes, small_bytes_of_two'),
        ("tuned small_bytes", "the line ends, but a size must follow"),
        ("tuned small_bytes 4K", '"4K" is not a size'),
        ("tuned staged_segment_bytes 0B", "must be a multiple of 4KiB"),
        ("tuned in_place_segment_bytes 5000B", "must be a multiple of 4KiB"),
        ("tuned small_bytes 4KiB world 2", '"world" is not a condition of a tuned size'),
        ("tuned small_bytes 4KiB processor", "the line ends, but a processor must follow"),
        ("tuned small_bytes 4KiB processor A-1 B-2", "nothing can follow the processor"),
    ],
)
def test_a_wrong_line_is_named(line, said):
    with pytest.raises(ringlet.InvalidUsage, match="the table, line 3: ") as refused:
        chosen(f"all_reduce ring\n# comment\n{line}\n")
    assert said in str(refused.value)


def test_a_tuned_size_counts_on_its_processor():
    table = "tuned streaming_bytes 4MiB processor A-1\nall_reduce ring\ntuned small_bytes 1KiB\n"
    built_in = _C.tuned("", "A-1")
    assert built_in["streaming_bytes"] == 8 << 20 and built_in["small_bytes_of_two"] == 1 << 19
    assert _C.tuned(table, "A-1") == built_in | {"streaming_bytes": 4 << 20, "small_bytes": 1024}
    assert _C.tuned(table, "A-2") == built_in | {"small_bytes": 1024}
    assert chosen(table) == "ring"


# ---- the file


def table_of(rank: int, tables: list[str | None]) -> Any:
    """RINGLET_TABLE is this rank's own file while a group is made."""
    return mock.patch.dict(os.environ, RINGLET_TABLE=tables[rank] or "")


@contextlib.contextmanager
def group_by(tables: list[str | None], rank: int, world: int, folder: str, transport: str = "shared_memory") -> Any:
    store = dist.FileStore(f"{folder}/store", world)
    with table_of(rank, tables), joined(rank, world, store, transport) as group:
        yield group


def choose_everywhere(rank: int, world: int, folder: str, transport: str, tables: list[str | None]) -> list[str]:
    """What `auto` means on this rank; and what it computes by it."""
    with group_by(tables, rank, world, folder, transport) as group:
        other = ringlet.new_group([1, 0, 2])
        values = torch.full((300,), rank + 1.0)
        ringlet.all_reduce(values)
        assert values.eq(world * (world + 1) / 2).all()
        return [each.algorithm_for("all_reduce", 1200) for each in (group, other)]


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "mixed"])
def test_rank_0s_table_counts_for_all(pool, tmp_path, transport):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("all_reduce above 1KiB up to 2KiB star\n")
    theirs.write_text("all_reduce ring\n")
    tables = [str(mine), str(theirs), None]
    told = pool.values(choose_everywhere, 3, str(tmp_path), transport, tables, join="nothing")
    assert told == [["star", "ring"]] * 3  # the second group's rank 0 is the first's rank 1


def carry_out(rank: int, world: int, folder: str, tables: list[str | None]) -> list[tuple[bool, int]]:
    """How this rank carries out registered calls of 16 KiB and 64 KiB and an ordinary one of 64 KiB."""
    with group_by(tables, rank, world, folder) as group:
        for values in (ringlet.empty(4 << 10), ringlet.empty(16 << 10), torch.empty(16 << 10)):
            ringlet.all_reduce(values.fill_(rank + 1.0), algorithm="two_shot")
            assert values.eq(world * (world + 1) / 2).all()
        return [(call["in_place"], call["segments"]) for call in group.calls()]


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_have_the_sizes_of_rank_0s_processor(pool, tmp_path, world):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    sizes = (
        "small_bytes 4KiB",
        "small_bytes_of_two 16KiB",
        "staged_segment_bytes 32KiB",
        "in_place_segment_bytes 8KiB",
    )
    mine.write_text("".join(f"tuned {size} processor {_C.processor_model()}\n" for size in sizes))
    theirs.write_text("tuned in_place_segment_bytes 4KiB\ntuned small_bytes 1MiB\ntuned small_bytes_of_two 1MiB\n")
    tables = [str(mine), str(theirs), None]
    told = pool.values(carry_out, world, str(tmp_path), tables, join="nothing")
    small, registered, ordinary = told[0]
    assert told == [[small, registered, ordinary]] * world
    assert small[0] == (world == 3) and small[1] >= (1 if world == 2 else 2)
    assert registered[0] and registered[1] >= 8 and not ordinary[0]
    assert ordinary[1] >= 2 or world > len(os.sched_getaffinity(0))  # who takes turns has larger segments


@on(2, "nothing")
def test_copies_through_and_past_the_cache(rank: int, world: int, folder: str) -> None:
    """Checks results of so many calls of each size that ranks have tried to copy past the cache."""
    with group_by([None] * world, rank, world, folder):
        registered, ordinary = ringlet.empty((1 << 18) + 37), torch.empty((1 << 18) + 37)
        for size in (8 << 10, *[8 << 10, 5003, 70_001] * 40, 1 << 18, 1 << 18):
            for memory, start in ((ordinary, 0), (ordinary, 3), (registered, 5), (registered, 0)):
                values = memory[start : start + size]
                ringlet.all_reduce(torch.arange(size, out=values).mul_(rank + 1))
                assert values.equal(torch.arange(size) * (world * (world + 1) / 2)), (size, start)
        for source in (1, 0):
            message = registered.copy_(torch.arange(len(registered)) + source) if rank == source else ordinary.zero_()
            ringlet.broadcast(message, source)
            assert message.equal(torch.arange(len(registered)) + source)
        for _ in range(20):
            if rank == 0:
                ringlet.send(ordinary, 1)
            else:
                ringlet.recv(ordinary.zero_(), 0)
                assert ordinary.equal(torch.arange(len(ordinary)) + 1)  # what rank 0 received above


def call_many_times(rank: int, world: int, folder: str, tables: list[str | None]) -> dict[str, list[tuple[str, bool]]]:
    """Algorithm and place of many calls, the two kinds of memory in turns. Checks their results."""
    with group_by(tables, rank, world, folder) as group:
        count = (1 << 18) + 37
        tensors = {"registered": ringlet.empty(count), "ordinary": torch.empty(count)}
        ways: dict[str, list[tuple[str, bool]]] = {kind: [] for kind in tensors}
        for number in range(PAUSE + 6 * TRIED + 100):
            for kind, tensor in tensors.items():
                ringlet.all_reduce(tensor.fill_(rank + number))
                assert tensor.eq(2 * number + 1).all(), number
                last = group.calls()[-1]
                ways[kind].append((last["algorithm"], last["in_place"]))
        return ways


PAUSE, TRIED = 64, 6 + 4  # calls before two trials; calls that a trial makes each way
IN_PLACE, ONE_SHOT, TWO_SHOT = ("two_shot", True), ("one_shot", False), ("two_shot", False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share a processor try nothing")
@pytest.mark.parametrize("tried", ["nothing", "places", "all"])
def test_two_ranks_try_places_and_algorithms(pool, tmp_path, tried):
    table = tmp_path / "table"
    told = {"nothing": "tuned timed_copy_bytes 1024GiB\n", "places": "all_reduce two_shot\n", "all": ""}
    table.write_text(told[tried])
    first, second = pool.values(call_many_times, 2, str(tmp_path), [str(table), None], join="nothing")
    assert first == second
    ways = {
        "nothing": {"registered": [IN_PLACE], "ordinary": [ONE_SHOT]},
        "places": {"registered": [IN_PLACE, TWO_SHOT], "ordinary": [TWO_SHOT]},
        "all": {"registered": [IN_PLACE, ONE_SHOT, TWO_SHOT], "ordinary": [ONE_SHOT, TWO_SHOT]},
    }[tried]
    for memory, expected in ways.items():
        found = first[memory]
        after = PAUSE + 2 * len(expected) * TRIED
        assert found[:PAUSE] == [expected[0]] * PAUSE
        for turn, way in enumerate(2 * expected):
            assert found[PAUSE + turn * TRIED :][:TRIED] == [way] * TRIED
        assert len(set(found[after:][:PAUSE])) == 1 and found[after] in expected


def test_torch_groups_and_threads_take_it_too(pool, tmp_path, monkeypatch):
    table = tmp_path / "table"
    table.write_text("all_reduce up to nothing star\n")
    for join in ("dist:ringlet", "shared_memory", "threads", "mixed", "alone"):
        for outcome in pool.run(join_with, 2, str(tmp_path / join.replace(":", "-")), join, str(table), join="nothing"):
            assert outcome.kind == "InvalidUsage", outcome
            assert f'{table}, line 1: "nothing" is not a size' in outcome.message


def join_with(rank: int, world: int, folder: str, how: str, table: str) -> None:
    """Rank 0 alone has the table."""
    with table_of(rank, [table, None]):
        if how == "threads":
            os.environ["RINGLET_TABLE"] = table
            ringlet.init(0, 1, transport="threads", name=f"{folder}-{rank}")
        elif how == "alone":
            os.environ["RINGLET_TABLE"] = table
            ringlet.init(0, 1)
        elif how == "dist:ringlet":
            store = dist.FileStore(folder, world)
            try:
                dist.init_process_group("ringlet", store=store, rank=rank, world_size=world)
                dist.all_reduce(torch.ones(1))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        else:
            with on_host(f"host {rank}" if how == "mixed" else None):
                transport = "auto" if how == "mixed" else how
                ringlet.init(rank, world, dist.FileStore(folder, world), transport=transport)


def test_the_store_ends_with_rank_0_only_after_all_were_told(tmp_path):
    """As under torchrun's static rendezvous: rank 0 serves the store, and is gone when it has raised."""
    table = tmp_path / "table"
    table.write_text("nonsense\n")
    program = "import ringlet; ringlet.init(timeout=60)"
    environment = os.environ | {"RINGLET_TABLE": str(table), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3"}
    environment["MASTER_PORT"] = str(free_ports(1)[0])
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    for rank in ranks:
        _, told = rank.communicate(timeout=100)
        assert rank.returncode == 1 and b'line 1: "nonsense" is not a collective' in told, told.decode()


def test_where_the_table_is(tmp_path, monkeypatch):
    monkeypatch.delenv("RINGLET_TABLE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    usual = tmp_path / ".config" / "ringlet" / "table"
    assert _C.given_table() == (str(usual), "")
    usual.parent.mkdir(parents=True)
    usual.write_text("all_reduce ring\n")
    assert _C.given_table() == (str(usual), "all_reduce ring\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert _C.given_table() == (str(tmp_path / "other" / "ringlet" / "table"), "")
    monkeypatch.setenv("RINGLET_TABLE", str(usual))
    assert _C.given_table()[1] == "all_reduce ring\n"
    monkeypatch.setenv("RINGLET_TABLE", "")
    assert _C.given_table() == ("", "")
    large = pathlib.Path(tmp_path / "large")
    large.write_text("#" * (1 << 20))
    monkeypatch.setenv("RINGLET_TABLE", str(large))
    with pytest.raises(ringlet.InvalidUsage, match="larger than any table"):
        _C.given_table()
