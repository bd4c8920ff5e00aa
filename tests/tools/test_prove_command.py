"""`ringlet prove` on files: every algorithm that is given is proved, and the exit code and the JSON say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringlet.cli.main import main
from ringlet.schedule import Schedule

RIGHT = [[[("send", 1, 0, 1), ("reduce", 1, 0, 1)]], [[("send", 0, 0, 1), ("reduce", 0, 0, 1)]]]
WRONG = [[[("send", 1, 0, 1)]], [[("reduce", 0, 0, 1)]]]


def written(folder: Path, name: str, steps: list) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(Schedule.from_steps("all_reduce", 1, steps).json())
    return str(path)


def test_two_files_with_one_name_are_refused(tmp_path, capsys):
    files = [written(tmp_path / "a", "swapped", WRONG), written(tmp_path / "b", "swapped", RIGHT)]
    for order in (files, files[::-1]):
        assert main(["prove", *order, "--world", "2"]) == 2
        assert "both have the all_reduce algorithm swapped: prove one at a time" in capsys.readouterr().err
    assert main(["prove", files[0], "--world", "2"]) == 1
    assert main(["prove", files[1], "--world", "2"]) == 0


@pytest.mark.parametrize("command", ["simulate", "search", "tune", "bench", "explore"])
def test_two_files_with_one_name_are_refused_wherever_they_would_be_compared(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    files = [written(tmp_path / "a", "swapped", WRONG), written(tmp_path / "b", "swapped", RIGHT)]
    machine = ["--hosts", "1x2", "--machine", "slow-uplinks"]
    words = {"simulate": [*machine, *files], "search": [*machine, "-b", "1K", "-e", "1K", *files], "tune": files}
    words |= {"bench": ["--algorithm", ",".join(files)], "explore": ["-o", str(tmp_path / "page.html"), *files]}
    try:
        assert main([command, *words[command]]) == 2
    except SystemExit as ended:  # argparse's
        assert ended.code == 2
    said = f"{files[0]} and {files[1]} both have the all_reduce algorithm swapped: give one at a time"
    assert said in capsys.readouterr().err


def test_an_algorithm_that_covers_none_of_the_worlds_is_told(tmp_path, capsys):
    files = [written(tmp_path, "for_two", RIGHT), written(tmp_path, "for_three", [*RIGHT, [[]]])]
    assert main(["prove", *files, "--world", "2"]) == 2
    assert "for_three covers none of these worlds" in capsys.readouterr().err


def test_two_schedules_of_one_world_are_refused(tmp_path, capsys):
    path = tmp_path / "twice.json"
    one = json.loads(Schedule.from_steps("all_reduce", 1, RIGHT).json())
    path.write_text(json.dumps([one, one]))
    assert main(["prove", str(path)]) == 2
    assert "has two schedules for world 2, root 0" in capsys.readouterr().err


@pytest.mark.parametrize("parts, step", ((20000, ("send", 1, 0, 1)), (1, ("send", 1, 7, 1))))
def test_a_picture_of_an_impossible_schedule_is_refused(tmp_path, capsys, parts, step):
    path = tmp_path / "impossible.json"
    ranks = [[[step]], [[("recv", 0, 0, 1)]]]
    path.write_text(Schedule.from_steps("all_reduce", parts, ranks).json())
    for command in (["draw", str(path), "--world", "2"], ["prove", str(path), "--world", "2"]):
        assert main(command) in (1, 2)
        said = capsys.readouterr()
        assert "lies outside the 1 parts" in said.err or "no engine takes more than 16384" in said.err
