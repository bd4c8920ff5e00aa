"""`ringlet explore` without a browser: what the page holds, and what the command says."""

import base64
import contextlib
import dataclasses
import io
import itertools
import json
import re
import zlib
from fractions import Fraction

import pytest

from ringlet.cli.main import main
from ringlet.schedule import load, schedule
from ringlet.schedule.collectives import ROOTED
from ringlet.schedule.explore import _ASSETS, SCRIPTS, page
from ringlet.schedule.explore.embed import catalogue, hosts_of, known_sources, scene
from ringlet.schedule.frames import frames_of
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.prove import prove


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path, capsys):
    assert main(["explore", "--world", "2-4", "-o", str(tmp_path / "page.html")]) == 0
    assert re.search(r"page.html: \d+ KiB, all algorithms, worlds 2-4\n", capsys.readouterr().out)
    html = (tmp_path / "page.html").read_text()
    for element in re.findall(r"<(?:script|link|img|iframe|source)[^>]*>", html):
        assert "src=" not in element and not re.search(r'href="(?!data:)', element), element
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert "default-src 'none'" in html
    addresses = set(re.findall(r"https?://[^\s'\"<>]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace is no request"
    assert html.count("</script>") == 2, "data cannot end its element"


def test_every_script_of_the_folder_is_in_the_page():
    assert {path.stem for path in _ASSETS.glob("*.js")} == set(SCRIPTS)


def test_equal_schedules_are_packed_once_and_missing_ones_told(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(f"[{schedule('ring', world=2).json()}, {schedule('ring', world=4).json()}]")
    (row,) = catalogue(known_sources(load(file))[:1], (2, 3, 4), {})["algorithms"]
    found = json.loads(zlib.decompress(base64.b64decode(row["data"])))
    places = [len(hosts_of(world)) for world in (2, 3, 4)]
    assert found["index"] == [0] * places[0] + [-1] * places[1] + [1] * places[2] and len(found["scenes"]) == 2


def rows(columns):
    return list(zip(*map(itertools.accumulate, columns), strict=True))


def ranks_of(nodes, node):
    terms = nodes[node]
    return sum(ranks_of(nodes, term) for term in terms) if isinstance(terms, list) else 1 << terms


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_scene_has_what_the_prover_and_the_drawings_have(world):
    places = [
        schedule(algorithm, collective, world=world, root=root, hosts=parse_hosts(hosts) if hosts else None)
        for algorithm, collective, _ in known_sources()
        for root in ({0, world - 1} if collective in ROOTED else {0})
        for hosts in hosts_of(world)
    ]
    for made in places:
        found, drawn, proof = scene(made), frames_of(made), prove(made)
        boxes = [[[None] * made.parts for _ in range(world)] for _ in drawn.frames]
        for moment, rank, box, origin, node, until in rows(found["contents"]):
            for later in range(moment, len(boxes)):
                boxes[later][rank][box] = (origin, ranks_of(found["nodes"], node), later >= until)
        expected = [
            [
                [chunk and (*chunk, (m, r, b) in drawn.spent) for b, chunk in enumerate(chunks)]
                for r, chunks in enumerate(f)
            ]
            for m, f in enumerate(drawn.frames)
        ]
        assert boxes == expected, made.name
        moved = [
            (("recv", "reduce", "copy")[verb], source, first + i, target, into + i, begins, ends)
            for verb, source, target, first, into, count, begins, ends in rows(found["messages"])
            for i in range(count if made.collective != "barrier" else 1)
        ]
        assert sorted(moved) == sorted(map(dataclasses.astuple, drawn.transfers)), made.name
        told = [found["rounds"], Fraction(found["sent"], found["unit"]), found["orders"]]
        assert told == [proof.rounds, proof.sent, proof.trees], made.name
        assert found["done"][-1] == world


def test_a_source_of_ones_own_is_shown_beside_the_known_sources():
    html = page(catalogue([*known_sources(), ("ring", "all_reduce", "</script>")], (2,), {"a": "</script>"}))
    assert html.count("</script>") == 2


REVEALED = {
    "target": "</svg><script>",
    "version": "1 & 2",
    "world": 3,
    "collective": "all_reduce",
    "dtype": "float32",
    "orders": [{"text": "((0+1)+2)"}, {"text": "(0+(1+2))"}],
    "messages": [{"elements": 9, "layouts": [{"starts": [0, 4], "orders": [0, 1]}]}],
}


def test_what_was_revealed_is_shown_beside_the_schedules(tmp_path):
    file, html = tmp_path / "found.json", tmp_path / "page.html"
    file.write_text(json.dumps([REVEALED]))
    assert main(["explore", "ring", "--world", "2-4", "--revealed", str(file), "-o", str(html)]) == 0
    page = html.read_text()
    assert page.count("</script>") == 2 and "&lt;script&gt;, 3 ranks" in page
    assert "A  ((0+1)+2)" in page and "B  (0+(1+2))" in page
    assert '"start":{"collective":"all_reduce","a":"ring","ranks":3}' in page
    for wrong in ("{}", "[{}]", "no json", "[1]", json.dumps([REVEALED | {"messages": []}])):
        file.write_text(wrong)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            assert main(["explore", "--revealed", str(file), "-o", str(html)]) == 2
        assert "found.json is no file that ringlet reveal --json writes" in told.getvalue(), wrong


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rnig",), "no algorithm is called 'rnig'; did you mean ring?"),
        (("ring", "butterfly", "star"), "the page shows one algorithm, or two side by side, got 3"),
        (("ring", "--collective", "broadcast"), "ring has no broadcast; it has: all_reduce"),
        (("linear", "pairwise"), "have no collective in common"),
        (("--world", "1-4"), "the page shows 2 to 30 ranks, got 1 to 4"),
        (("--world", "64"), "the page shows 2 to 30 ranks, got 64"),
        (("--revealed", "no/such.json"), "--revealed: cannot read no/such.json: No such file"),
        (("-o", "no/such/folder/page.html"), "(is the folder no/such/folder there?)"),
    ],
)
def test_what_cannot_be_shown_is_refused(words, told, capsys):
    assert main(["explore", "-o", "page.html", *words]) == 2
    assert told in capsys.readouterr().err
