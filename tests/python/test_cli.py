"""The command line as a user starts it: processes of their own, few of them, for each imports torch."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree

import pytest


def ringlet(*arguments, timeout=120, **environment):
    command = [sys.executable, "-m", "ringlet", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"COLUMNS": "100"} | environment,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_help_has_a_line_for_each_command_and_an_example():
    done = ringlet("--help")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    for command in ("bench", "tune", "prove", "draw", "doctor"):
        told = [words for words in lines if words[:1] == [command]]
        assert len(told) == 1 and len(told[0]) > 3, done.stdout
    assert "example:" in done.stdout


def test_prove_writes_a_table_for_people_and_one_for_programs(tmp_path):
    done = ringlet("prove", "--worlds", "1-5,8", "--collective", "all_reduce", "--json", tmp_path / "proofs.json")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.startswith("algorithm") and {"ring", "butterfly", "two_shot"} <= {row.split()[0] for row in rows}
    written = json.loads((tmp_path / "proofs.json").read_text())
    assert written["proved"] is True
    assert len(written["rows"]) == len(rows)
    assert {proof["world"] for proof in written["proofs"]} == {1, 2, 3, 4, 5, 8}


def test_draw_prints_text_and_writes_svg(tmp_path):
    picture = tmp_path / "ring.svg"
    done = ringlet("draw", "ring", "--world", 3, "--text", "-o", picture)
    assert done.returncode == 0, done.stderr
    assert "ring all_reduce, world 3" in done.stdout
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_doctor_finds_what_the_suite_needs(tmp_path):
    done = ringlet("doctor", "--json", tmp_path / "doctor.json")
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert done.returncode == 0 and written["ok"] is True, done.stdout
    states = {(finding["part"], finding["name"]): finding["state"] for finding in written["findings"]}
    for needed in (("build", "torch"), ("transport", "threads"), ("transport", "shared_memory")):
        assert states[needed] == "ok", done.stdout
    for finding in written["findings"]:
        assert finding["state"] in ("ok", "absent", "poor", "fails") and finding["told"]
        if finding["state"] in ("poor", "fails"):
            assert finding["advice"] in done.stdout
    assert done.stderr == ""  # progress is for terminals


def test_doctor_says_what_to_do_about_what_fails(tmp_path):
    done = ringlet("doctor", "--json", tmp_path / "doctor.json", RINGLET_CPU_KERNELS="none-such")
    assert done.returncode == 1
    failing = [f for f in json.loads((tmp_path / "doctor.json").read_text())["findings"] if f["state"] == "fails"]
    assert "RINGLET_CPU_KERNELS=none-such" in next(f["advice"] for f in failing if f["part"] == "kernels")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "COMMAND"),
        (("sing",), "sing"),
        (("draw", "ring", "--world", "0"), "world must be"),
        (("prove", "--worlds", "none"), "none"),
        (("doctor", "--json", "/nowhere/doctor.json"), "/nowhere/doctor.json"),
    ],
)
def test_bad_arguments_exit_2_with_what_is_wrong(arguments, told):
    done = ringlet(*arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_reader_that_leaves_is_no_failure():
    command = f"{sys.executable} -m ringlet draw ring --world 64 | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ring all_reduce" in done.stdout
