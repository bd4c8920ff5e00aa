"""Schedules as data: what they look like, what they cost, how they are drawn, and the two commands."""

import itertools
import json
import math
import re
import xml.etree.ElementTree
from fractions import Fraction

import pytest

import ringlet
from ringlet.cli.main import main
from ringlet.schedule import Schedule
from ringlet.schedule.cost import sent
from ringlet.schedule.draw import picture, svg, text
from ringlet.schedule.machine_file import Machine

REGISTERED = [(algorithm, collective) for algorithm, collective, _ in ringlet.schedule.algorithms()]


def test_the_module_is_called_for_a_schedule():
    ring = ringlet.schedule("ring", world=3)
    assert ring == ringlet.schedule.schedule("ring", "all_reduce", world=3)
    assert (ring.collective, ring.world, ring.parts, ring.rounds) == ("all_reduce", 3, 3, 4)
    assert str(ring.ranks[0][0]) == "send [2] to 1, reduce [1] from 2"
    assert "rank 1: send [0] to 2, reduce [2] from 0 | send [2] to 2" in repr(ring)


def test_repr_of_a_large_world_is_short():
    assert "... and 56 more ranks" in repr(ringlet.schedule("circulant", world=64))


@pytest.mark.parametrize(
    "arguments, known",
    [
        ({"algorithm": "rong", "world": 3}, "halving_doubling"),
        ({"algorithm": "ring", "collective": "all-reduce", "world": 3}, "all_reduce, reduce_scatter"),
        ({"algorithm": "ring", "world": 0}, "world must be from 1 to .*, got 0"),
        (
            {"algorithm": "tree", "collective": "reduce", "world": 3, "root": 3},
            "root must be a rank from 0 to 2, got 3",
        ),
        ({"algorithm": "ring", "world": 3, "root": 1}, "no root"),
        ({"algorithm": None, "world": 2}, "algorithm is None; pass a name"),
        ({"algorithm": "ring", "world": "3"}, "must be whole numbers: 'str'"),
        ({"algorithm": "ring", "hosts": ("a", "b")}, "must be whole numbers: 'str'"),
        ({"algorithm": "ring"}, "pass world="),
        ({"algorithm": "ring", "collective": None, "world": 2}, "collective is None; pass its name"),
        ({"algorithm": "ring", "world": 1 << 40}, "too large"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(arguments, known):
    with pytest.raises(ValueError, match=known):
        ringlet.schedule(**arguments)


def test_a_hand_made_schedule_equals_the_registered_one():
    rounds = [[[("send", 1 - rank, 0, 1), ("reduce", 1 - rank, 0, 1)]] for rank in range(2)]
    made = Schedule.from_steps("all_reduce", 1, rounds, algorithm="butterfly")
    assert made == ringlet.schedule("butterfly", world=2)


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_model_time_of_the_ring_is_its_textbook_form(world):
    machine, nbytes = Machine("one host", 1.0, 0.01, 0.0, 0.0, 0.0, gamma=0.001), 1000.0
    share = (world - 1) / world
    expected = 2 * (world - 1) * 1.0 + 2 * share * nbytes * 0.01 + share * nbytes * 0.001
    cost = ringlet.schedule("ring", world=world).cost(nbytes, machine)
    assert cost.seconds == pytest.approx(expected)
    assert cost.ranks == pytest.approx([expected] * world)


def test_model_time_counts_waiting_and_the_busy_root():
    machine = Machine("one host", 1.0, 0.01, 0.0, 0.0, 0.0, gamma=0.0)
    # Rank 1 hears of a tree's broadcast in the root's last round, though it has one round itself.
    assert ringlet.schedule("tree", "broadcast", world=8).cost(100, machine).ranks[1] == pytest.approx(3 * (1.0 + 1.0))
    assert ringlet.schedule("star", "broadcast", world=8).cost(100, machine).seconds == pytest.approx(1.0 + 7 * 1.0)


@pytest.mark.parametrize("nbytes", [-5, math.nan, math.inf])
def test_a_cost_of_no_number_of_bytes_is_refused(nbytes):
    with pytest.raises(ringlet.InvalidUsage, match=f"nbytes must be a number of bytes from 0 on, got {nbytes}"):
        ringlet.schedule("ring", world=3).cost(nbytes)


def test_counts_are_exact():
    assert sent(ringlet.schedule("star", "reduce", world=5)) == (0, 1, 1, 1, 1)
    assert sent(ringlet.schedule("ring", world=5)) == (Fraction(8, 5),) * 5


@pytest.mark.parametrize("algorithm, collective", REGISTERED)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_picture_is_wellformed_and_always_the_same(algorithm, collective, world):
    first = svg(ringlet.schedule(algorithm, collective, world=world))
    assert first == svg(ringlet.schedule(algorithm, collective, world=world))
    root = xml.etree.ElementTree.fromstring(first)
    drawn = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in drawn if name and name.startswith("rank ")] == [f"rank {rank}" for rank in range(world)]


def test_text_picture_of_the_butterfly():
    picture = text(ringlet.schedule("butterfly", world=3))
    assert picture == (
        "butterfly all_reduce, world 3: 3 rounds, at most 2 S sent per rank\n"
        "\n"
        "         rank 0  rank 1  rank 2\n"
        "start    █··     ·█·     ··█\n"
        "round 0  →1\n"
        "         █··     ██·     ··█\n"
        "round 1          →2      →1\n"
        "         █··     ███     ███\n"
        "round 2          →0\n"
        "         ███     ███     ███\n"
    )


def test_text_picture_of_the_ring_fills_chunk_by_chunk():
    lines = text(ringlet.schedule("ring", world=4)).splitlines()
    assert lines[4:6] == ["round 0  3→1     0→2     1→3     2→0", "         ▂▂▄▂    ▂▂▂▄    ▄▂▂▂    ▂▄▂▂"]
    assert lines[-1].split() == ["████"] * 4


def test_prove_command_prints_a_table_and_writes_json(tmp_path, capsys):
    report = tmp_path / "proofs.json"
    assert main(("prove", "--worlds", "1-5,8", "--algorithm", "ring,butterfly", "--json", str(report))) == 0
    rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ["ring", "all_reduce", "1-5,8", "2(p-1)", "2S(p-1)/p"] in rows
    data = json.loads(report.read_text())
    assert data["proved"] and [[row["algorithm"], row["collective"]] for row in data["rows"]] == [
        row[:2] for row in rows
    ]
    assert {row[0] for row in rows} == {"ring", "butterfly"}
    assert {row[1] for row in rows if row[0] == "ring"} == {"all_reduce", "reduce_scatter", "all_gather"}
    assert {"algorithm": "ring", "world": 5, "sent": "8/5"}.items() <= data["proofs"][4].items()


def test_a_picture_of_many_ranks_shows_ranks(tmp_path, capsys):
    file = tmp_path / "ring.svg"
    assert main(("draw", "ring", "--world", "40", "-o", str(file))) == 0
    assert "one bar for each rank (--force draws every chunk)" in capsys.readouterr().out
    assert file.stat().st_size < 1 << 20
    drawn = xml.etree.ElementTree.parse(file).getroot()
    messages = [e.get("d") for e in drawn.iter("{http://www.w3.org/2000/svg}path") if e.get("stroke") == "#D55E00"]
    assert [path.count("M") for path in messages] == [40] * 78, "one path for the messages of each round"

    assert main(("draw", "ring", "--world", "20", "-o", str(file), "--force")) == 0
    assert file.read_text(encoding="utf-8") == ringlet.schedule("ring", world=20).svg()


def test_an_overview_fills_ranks_as_their_chunks_fill(monkeypatch):
    monkeypatch.setattr("ringlet.schedule.draw.MOST_BOXES_OF_CHUNKS", 0)
    paths = re.findall(r'<path d="([^"]*)" fill="#0072B2"', picture(ringlet.schedule("ring", world=4)))
    heights = [[float(height) for height in re.findall(r"v([\d.]+)", path)] for path in paths]
    assert heights[0] == [4.0] * 4 and heights[-1] == [16.0] * 4, "a contribution of four, then all"
    assert all(after >= before for before, after in itertools.pairwise(map(sum, heights)))


def test_the_ending_chooses_the_format(tmp_path):
    words = tmp_path / "ring.txt"
    assert main(("draw", "ring", "-o", str(words))) == 0
    assert words.read_text(encoding="utf-8") == ringlet.schedule("ring", world=4).text()
