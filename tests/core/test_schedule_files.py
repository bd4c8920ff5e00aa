"""Schedules in files: JSON there and back, files as algorithms of a process and its groups, pictures in notebooks."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on
from ringlet.schedule import algorithms, load, schedule
from ringlet.schedule.files import from_json
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.prove import prove

EVERY = [(algorithm, collective) for algorithm, collective, _ in algorithms()]


@pytest.mark.parametrize("algorithm, collective", EVERY)
def test_json_there_and_back(algorithm, collective):
    for hosts in (None, "2x3:cyclic"):
        made = schedule(algorithm, collective, world=6, hosts=parse_hosts(hosts) if hosts else None)
        assert from_json(made.json()) == [made]
    if collective in ("broadcast", "reduce", "gather", "scatter"):
        made = schedule(algorithm, collective, world=3, root=2)
        assert from_json(made.json()) == [made]


def test_a_file_of_several_worlds_and_roots(tmp_path):
    path = tmp_path / "grown.json"
    made = [schedule("tree", "broadcast", world=world, root=root) for world in (2, 3) for root in range(world)]
    path.write_text("[" + ",".join(one.json() for one in made) + "]")
    (own,) = load(path)
    assert (own.name, own.collective, own.origin) == ("grown", "broadcast", "grown.json")
    assert own.schedule(3, 2).ranks == made[-1].ranks
    assert load(path) == [own]
    with pytest.raises(NotImplementedError, match=r"grown.json has schedules for worlds 2, 3, and not for 4, root 0"):
        own.schedule(4)


SWAP = """{"collective": "all_reduce", "world": 2, "parts": 1,
  "ranks": [[[["send", 1, 0, 1], ["reduce", 1, 0, 1]]], [[["send", 0, 0, 1], ["reduce", 0, 0, 1]]]]}"""

TO_0 = SWAP.replace("all_reduce", "reduce")
TO_1 = TO_0.replace('"parts": 1', '"parts": 2, "root": 1')


def test_the_least_that_a_file_needs():
    (made,) = from_json(SWAP)
    assert made.name == "hand-made all_reduce, world 2" and prove(made).rounds == 1


@pytest.mark.parametrize(
    "change, words",
    [
        (("{", "["), "Expecting"),
        ((SWAP, "[" * 100_000), "recursion"),
        (('"parts": 1', '"parts": 1, "root": 1'), "root must be 0, because all_reduce has no root, got 1"),
        (("all_reduce", "all_sum"), "collective must be one of all_reduce, .*, got 'all_sum'"),
        (('"world": 2', '"world": "2"'), "world must be a whole number from 1 on, got '2'"),
        (('"world": 2', '"world": true'), "world must be a whole number from 1 on, got True"),
        (('"world": 2', '"world": 3'), "world 3, root 0, 2 ranks and 0 hosts do not go together"),
        (('"parts": 1', '"parts": 0'), "parts must be a whole number from 1 on, got 0"),
        (('"parts": 1', '"parts": 1, "root": 2'), "world 2, root 2, 2 ranks and 0 hosts do not go together"),
        (('"parts": 1', '"parts": 1, "hosts": 5, "root": 2'), "hosts must be a list, got 5"),
        (('"parts": 1', '"parts": 1, "hosts": [0]'), "2 ranks and 1 hosts do not go together"),
        (('["send", 1, 0, 1]', '["send", 1, 0]'), r"ranks\[0\]\[0\]: a step is \[verb, peer, first, count\], got"),
        (('["send", 1, 0, 1]', '["send", 1, 0, -1]'), r"ranks\[0\]\[0\] must be a whole number from 0 on, got -1"),
        (('["send", 1, 0, 1]', "7"), r"ranks\[0\]\[0\]: a step is"),
        (('[[["send", 1, 0, 1], ["reduce", 1, 0, 1]]]', "5"), r"ranks\[0\] must be a list, got 5"),
        ((SWAP, "5"), "a schedule is an object with collective, world, parts and ranks, got 5"),
        ((SWAP, "[]"), "must have schedules of one collective, got none"),
        ((SWAP, f"[{SWAP}, {TO_0}]"), "of one collective, got all_reduce, reduce"),
        ((SWAP, f"[{TO_0}, {TO_1}]"), "the same parts for every root"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, change, words):
    path = tmp_path / "wrong.json"
    path.write_text(SWAP.replace(*change, 1) if change[0] != SWAP else change[1])
    with pytest.raises(ringlet.InvalidUsage, match=f"wrong.json: .*{words}"):
        load(path)


def test_the_name_of_a_file_is_the_algorithms(tmp_path):
    for name, words in (("ring.json", 'has a built-in algorithm "ring"'), ("2.json", "begin it with a letter")):
        (tmp_path / name).write_text(SWAP)
        with pytest.raises(ringlet.InvalidUsage, match=words):
            load(tmp_path / name)
    (tmp_path / "mine.yaml").write_text(SWAP)
    with pytest.raises(ringlet.InvalidUsage, match=r"must end in \.py, \.json, \.xml"):
        load(tmp_path / "mine.yaml")


HELPER_BELOW = """
import ringlet
from ringlet.schedule import reduce, send

@ringlet.algorithm("all_reduce", name="helped_from_below", parts=1)
def helped_from_below(rank, world):
    yield both(1 - rank)

def both(peer):
    return send(peer, 0), reduce(peer, 0)
"""


def test_a_file_makes_its_algorithms_once(tmp_path):
    (tmp_path / "mine.py").write_text(HELPER_BELOW)
    (tmp_path / "outer.py").write_text(f"import ringlet\nringlet.schedule.load({str(tmp_path / 'mine.py')!r})\n")
    (made,) = load(tmp_path / "mine.py")
    assert load(tmp_path / "mine.py") == load(tmp_path / "outer.py") == [made]
    (tmp_path / "LOUD.PY").write_text(HELPER_BELOW.replace("helped_from_below", "loud"))
    assert load(tmp_path / "LOUD.PY")[0].name == "loud"


def test_the_file_that_is_loaded_last_has_the_name(tmp_path):
    files = [tmp_path / folder / "loaded_last.json" for folder in "ab"]
    schedules = [schedule(name, world=4) for name in ("one_shot", "ring")]
    for file, made in zip(files, schedules, strict=True):
        file.parent.mkdir()
        file.write_text(made.json())
    for turn in (0, 1, 0, 0, 1):
        (made,) = load(files[turn])
        assert made.schedule(4).ranks == schedule("loaded_last", world=4).ranks == schedules[turn].ranks
    assert load(str(files[1]).encode())[0] is made
    for wrong, words in ((None, "pass the path"), (5, "pass the path"), ("a\0.py", "cannot read the file")):
        with pytest.raises(ringlet.InvalidUsage, match=words):
            load(wrong)


def test_a_wrong_schedule_of_a_file_is_refused_before_it_runs(pool, tmp_path):
    path = tmp_path / "lost.json"
    path.write_text(SWAP.replace('["reduce", 1, 0, 1]', '["recv", 1, 0, 1]').replace('["send", 1, 0, 1], ', "", 1))
    said = pool.values(refused, 2, str(path))
    assert said[0] == said[1] and '"lost" is wrong: lost all_reduce, world 2: rank ' in said[0]


def refused(rank: int, world: int, path: str) -> str:
    (made,) = load(path)
    with pytest.raises(ringlet.InvalidUsage) as raised:
        ringlet.all_reduce(torch.ones(10), algorithm=made)
    return str(raised.value)


# ---- in groups


@pytest.fixture
def files(tmp_path):
    """Its algorithms are from_json and from_xml."""
    (tmp_path / "from_json.json").write_text(schedule("swing", world=4).json())
    (tmp_path / "from_xml.xml").write_text(schedule("one_shot", world=4).xml())
    return [str(tmp_path / name) for name in ("from_json.json", "from_xml.xml")]


@on(4, "nothing")
def test_a_variable_names_the_files(rank: int, world: int, path: str, files: list[str]) -> None:
    """A program that names no file: its groups know the algorithms."""
    with mock.patch.dict(os.environ, RINGLET_ALGORITHMS=os.pathsep.join(files)):
        ringlet.init(rank, world, dist.FileStore(path, world), timeout=timedelta(seconds=60))
        try:
            for name in ("from_json", "from_xml"):
                for count in (1, 1000, 123_567):
                    torch.manual_seed(rank)
                    mine = torch.randn(count)
                    expected = mine.clone()
                    ringlet.all_reduce(expected, algorithm="two_shot")
                    ringlet.all_reduce(mine, algorithm=name)
                    torch.testing.assert_close(mine, expected)
                    assert ringlet.current().calls()[-1]["algorithm"] == name
        finally:
            ringlet.finalize()
    said = "RINGLET_ALGORITHMS: /missing/mine.py: cannot read the file"
    missing = mock.patch.dict(os.environ, RINGLET_ALGORITHMS="/missing/mine.py")
    with missing, pytest.raises(ringlet.InvalidUsage, match=said):
        ringlet.init(rank, world, dist.FileStore(path, world))


# ---- in notebooks


def test_a_schedule_shows_as_its_picture():
    made = schedule("ring", world=4)
    drawn = made._repr_svg_()
    assert drawn == made.svg() and ElementTree.fromstring(drawn).tag.endswith("svg")
    large = schedule("ring", world=40)
    shown = large._repr_svg_()
    assert "a bar is a rank" in shown and len(shown) < len(large.svg()) / 10
    assert schedule("butterfly", world=1024)._repr_svg_() is None  # the text is shown


def test_a_wrong_schedule_shows_as_text():
    (wrong,) = from_json(SWAP.replace('["send", 1, 0, 1], ', ""))
    assert wrong._repr_svg_() is None and "rank 0: reduce [0] from 1" in repr(wrong)
