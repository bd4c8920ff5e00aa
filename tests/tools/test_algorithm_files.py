"""Files of algorithms in all commands: mine.py, mine.py:name, FILE.json and FILE.xml."""

from __future__ import annotations

import json
import os
import re

import pytest

from ringlet.cli.main import main
from ringlet.schedule import load

MINE = '''\
import ringlet
from ringlet.schedule import recv, reduce, send

@ringlet.algorithm("all_reduce", name="of_commands", order="along")
def mine(rank, world):
    """The ring, once more."""
    right, left = (rank + 1) % world, (rank - 1) % world
    for i in range(world - 1):
        yield send(right, (rank - 1 - i) % world), reduce(left, (rank - 2 - i) % world)
    for i in range(world - 1):
        yield send(right, (rank - i) % world), recv(left, (rank - 1 - i) % world)
'''
SECOND = MINE.replace("of_commands", "second") + MINE.partition("\n\n")[2].replace("of_commands", "third")
PAIRS = """\
import ringlet

@ringlet.algorithm("all_reduce", name="pairs", parts=1)
def pairs(rank, world):
    if world != 8 and world != 4:
        raise NotImplementedError("four or eight ranks")
    for peer in [rank ^ far for far in (4, 2, 1) if far < world]:
        yield ringlet.schedule.send(peer, 0), ringlet.schedule.reduce(peer, 0)
"""
WRONG = MINE.replace("of_commands", "wrong").replace("recv(left", "reduce(left")
FAILS = MINE.replace("of_commands", "fails").replace("(rank - 1) % world\n", "(rank - 1) % world // 0\n")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """mine.py, two.py with two algorithms, pairs.py, wrong.py, fails.py, and of_json.json and of_xml.xml for eight
    ranks."""
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    texts = {"mine": MINE, "two": SECOND, "pairs": PAIRS, "wrong": WRONG, "fails": FAILS}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    made = load(tmp_path / "mine.py")[0].schedule(8)
    (tmp_path / "of_json.json").write_text(made.json())
    (tmp_path / "of_xml.xml").write_text(made.xml())
    return {path.stem: str(path) for path in tmp_path.iterdir()}


KINDS = ["mine", "of_json", "of_xml"]


@pytest.mark.parametrize("kind", KINDS)
def test_prove(files, kind, capsys):
    assert main(["prove", files[kind], *(["--world", "1-16"] if kind == "mine" else [])]) == 0
    out = capsys.readouterr().out
    worlds = "1-16" if kind == "mine" else "8"
    assert re.search(rf"^{'of_commands' if kind == 'mine' else kind} +all_reduce +{worlds} ", out, re.MULTILINE)


def test_prove_tells_what_is_wrong(files, capsys):
    assert main(["prove", files["wrong"]]) == 1
    assert "not proved: wrong all_reduce, world 2: rank 1, round 1, chunk 0: adds" in capsys.readouterr().err


def exchange(first, second):
    """A program of two GPUs, each of which takes these steps on the one chunk."""
    places = 'srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1"'
    steps = "".join(f'<step type="{kind}" {places}/>' for kind in (first, second))
    gpus = "".join(
        f'<gpu id="{rank}"><tb id="0" send="{1 - rank}" recv="{1 - rank}" chan="0">{steps}</tb></gpu>'
        for rank in range(2)
    )
    return f'<algo nchunksperloop="1" ngpus="2" coll="allreduce" inplace="1">{gpus}</algo>'


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (exchange("s", "rrc"), 0, ""),
        (exchange("rrc", "s"), 2, "a deadlock: GPU 0, threadblock 0, step 0 (rrc) waits for a message of GPU 1"),
        (exchange("cpy", "cpy"), 1, "ends without the contribution of rank 1"),
        (None, 2, "cannot read the file"),
    ],
)
def test_a_program_without_a_schedule_fails_its_proof(text, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    program, verdict = tmp_path / "program.xml", tmp_path / "verdict.json"
    if text is not None:
        program.write_text(text)
    assert main(["prove", str(program), "--json", str(verdict)]) == code
    said = capsys.readouterr().err
    assert told in said and said.startswith({0: "", 1: "not proved: ", 2: "ringlet prove: "}[code])
    assert verdict.exists() == (code != 2)
    if code == 1:
        said = json.loads(verdict.read_text())
        assert not said["proved"] and told in said["error"]["message"]


@pytest.mark.parametrize("kind", KINDS)
def test_draw_and_back(files, kind, tmp_path, capsys):
    assert main(["draw", files[kind], "--world", "8", "-o", str(tmp_path / "picture.svg")]) == 0
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")
    for ending in ("json", "xml"):
        again = tmp_path / f"again_{kind}.{ending}"
        assert main(["draw", files[kind], "--world", "8", "-o", str(again)]) == 0
        assert load(again)[0].schedule(8).ranks == load(files["mine"])[0].schedule(8).ranks
    assert main(["draw", "linear", "--collective", "gather", "-o", str(tmp_path / "gather.xml")]) == 2
    assert "MSCCL-XML has" in capsys.readouterr().err


def test_draw_of_what_is_no_round(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    (tmp_path / "odd.py").write_text(MINE.replace("of_commands", "odd").replace("yield send", "yield 1, send"))
    assert main(["draw", str(tmp_path / "odd.py")]) == 2
    assert re.match(r"ringlet draw: .*rank 0, round 0: yields \(1, .* but a round is a send", capsys.readouterr().err)


def test_one_of_several(files, capsys):
    assert main(["draw", f"{files['two']}:third", "--world", "3"]) == 0
    assert capsys.readouterr().out.startswith("third all_reduce, world 3")
    for words, told in (
        (files["two"], f"has several: give one of {files['two']}:second, {files['two']}:third"),
        (f"{files['two']}:fourth", f"is none of {files['two']}:second, {files['two']}:third"),
        ("/missing/mine.py", "/missing/mine.py: cannot read the file"),
    ):
        with pytest.raises(SystemExit):
            main(["draw", words])
        assert told in capsys.readouterr().err


def test_a_given_file_is_known_by_name(files, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", files["mine"])
    assert main(["draw", "of_commands", "--world", "3"]) == 0
    assert capsys.readouterr().out.startswith("of_commands all_reduce, world 3")
    assert main(["explore", "of_commands", "--world", "2", "-o", f"{files['mine']}.html"]) == 0
    monkeypatch.setenv("RINGLET_ALGORITHMS", "/missing/mine.py")
    with pytest.raises(SystemExit):
        main(["draw", "of_commands"])
    assert "RINGLET_ALGORITHMS: /missing/mine.py: cannot read the file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_explore(files, kind, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["explore", "ring", files[kind], "--world", "8", "-o", str(page)]) == 0
    name = "of_commands" if kind == "mine" else kind
    start = json.loads(re.search(r'"start": ?(\{[^}]*\})', page.read_text())[1])
    assert start == {"collective": "all_reduce", "a": "ring", "b": name}
    assert main(["explore", files["two"], files[kind], "-o", str(page)]) == 2
    assert "one algorithm, or two side by side, got 3" in capsys.readouterr().err
    assert main(["explore", files["wrong"], "-o", str(page)]) == 2
    assert "wrong all_reduce, world 2: rank 1, round 1, chunk 0" in capsys.readouterr().err


def test_tune_shows_rules_that_name_one(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", files["mine"])
    monkeypatch.setenv("RINGLET_TABLE", str(tmp_path / "table"))
    (tmp_path / "table").write_text("all_reduce up to 64KiB of_commands\n")
    assert main(["tune", "--show"]) == 0
    assert "all_reduce up to 64KiB of_commands\n" in capsys.readouterr().out


def test_search(files, capsys):
    words = ["--hosts", "4x2", "--machine", "slow-uplinks", "-b", "1M", "-e", "1M"]
    assert main(["search", *words]) == 0
    before = int(capsys.readouterr().out.split()[0])
    assert main(["search", files["of_json"], files["of_xml"], *words]) == 0
    # The same schedules under other names are no candidates of their own: these are the ring's.
    assert int(capsys.readouterr().out.split()[0]) == before
    assert main(["search", files["pairs"], *words]) == 0
    assert int(capsys.readouterr().out.split()[0]) > before  # by itself, and in compositions
    assert main(["search", files["wrong"], *words]) == 2
    assert "wrong all_reduce, world 8" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prove", "draw", "simulate", "search", "explore"])
def test_what_a_function_raises_is_told_in_one_line(files, tmp_path, capsys, command):
    place = ["--hosts", "4x2", "--machine", "slow-uplinks", "--sizes", "4K"]
    words = {"simulate": place, "search": place[:4], "explore": ["-o", str(tmp_path / "page.html")]}
    assert main([command, files["fails"], *words.get(command, [])]) == (1 if command == "prove" else 2)
    said = capsys.readouterr()
    assert re.fullmatch(r".*: rank 0, round 0: raises ZeroDivisionError: .* \(fails.py:\d+\)\n", said.err)
    assert said.out == ""


def test_simulate(files, tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.json"
    words = ["--hosts", "4x2", "--machine", "slow-uplinks", "--sizes", "4K,1M"]
    given = ["ring", f"{files['mine']},{files['of_json']}", files["of_xml"]]
    assert main(["simulate", *given, *words, "--json", str(rows)]) == 0
    found = [row | {"algorithm": ""} for row in json.loads(rows.read_text())["rows"]]
    # The same schedule under four names, at two sizes.
    assert len(found) == 8 and found == 4 * found[:2]
    capsys.readouterr()
    assert main(["simulate", files["wrong"], *words]) == 2
    said = capsys.readouterr()
    assert "wrong all_reduce, world 8, hosts 4x2: rank 5, round 7, chunk 4: adds" in said.err and said.out == ""
    assert main(["simulate", files["pairs"], "--world", "5", *words[2:]]) == 2
    assert "pairs: four or eight ranks" in capsys.readouterr().err
    assert main(["simulate", files["mine"], "--collective", "broadcast", *words]) == 2
    assert "of_commands is an algorithm of all_reduce, not of broadcast" in capsys.readouterr().err
    # Without a name: all of the collective, and what RINGLET_ALGORITHMS names, except for other worlds.
    monkeypatch.setenv("RINGLET_ALGORITHMS", os.pathsep.join([files["mine"], files["pairs"]]))
    assert main(["simulate", "--world", "5", *words[2:], "--json", str(rows)]) == 0
    names = {row["algorithm"] for row in json.loads(rows.read_text())["rows"]}
    assert {"ring", "butterfly", "of_commands"} < names and "pairs" not in names


def test_measured_in_bench(files, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    words = ["--world", "8", "-b", "4K", "-e", "4K", "--ms", "5", "--rounds", "1", "--peers", "none"]
    every = ",".join(files[kind] for kind in KINDS)
    assert main(["bench", "--algorithm", f"ring,{every}", "--memory", "ordinary", *words, "--json", str(rows)]) == 0
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["algorithm"] for row in measured} == {"ring", "of_commands", "of_json", "of_xml"}
    assert all(row["wrong"] == 0 for row in measured)
    assert main(["bench", "--algorithm", files["mine"], "--collective", "broadcast", *words]) == 2
    assert "'of_commands' is not one of broadcast's: auto, tree" in capsys.readouterr().err


def test_measured_in_tune(files, tmp_path, capsys):
    table = tmp_path / "table"
    words = ["-b", "4K", "-e", "4K", "--ms", "5", "--rounds", "1", "--margin", "-99", "-o", str(table)]
    assert main(["tune", files["mine"], *words]) == 0
    assert "all_reduce" in table.read_text() and "broadcast" not in table.read_text()
    from ringlet.cli.tune import alternatives

    own = load(files["mine"])
    assert alternatives(own)["all_reduce"][-1] == "of_commands" and "of_commands" not in str(alternatives())


def test_a_table_says_which_file_it_needs(files):
    from ringlet.cli import algorithm_files

    algorithm_files.of_file(files["mine"])
    told = algorithm_files.comment(["ring", "of_commands"])
    assert told == f"# Programs that use this table need RINGLET_ALGORITHMS={files['mine']}\n"
    assert algorithm_files.comment(["ring"]) == "" and os.environ["RINGLET_ALGORITHMS"] == files["mine"]
