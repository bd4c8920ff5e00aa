"""benchmarks/builds.py: it makes the calls of two builds in turns, and fails when one is slower than noise."""

from __future__ import annotations

import pathlib
import sys

import pytest
from benchmarks import builds

import ringlet
from programs import printed

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(ringlet.__file__).parents[1]


def test_all_ways_of_two_builds():
    words = f"--way {','.join(builds.WAYS)} --sizes 4 --starts 1 --rounds 1 --ms 1 --least 0".split()
    told = printed(sys.executable, "-m", "benchmarks.builds", HERE, *words, cwd=ROOT)
    rows = [line.split(" | ")[:3] for line in told.splitlines() if line.endswith("|")][2:]
    assert rows == [[f"| {way}", memory, "4 B"] for way in builds.WAYS for memory in builds.MEMORIES]


def test_a_build_that_is_none_is_named(tmp_path):
    (tmp_path / "ringlet.py").write_text("raise ImportError('no ringlet')")
    build = builds.Build(tmp_path, "shared_memory")
    with pytest.raises(SystemExit, match=f"rank 0 of {tmp_path} ended before call ordinary 4: its error is above"):
        build.turn(("call", "ordinary", 4), 1)
    build.end()


@pytest.mark.parametrize(
    ("itself", "this", "fails"), [(2.0, 2.0, 0), (2.0, 2.05, 0), (2.0, 2.4, 1), (2.6, 2.4, 0), (2.0, 1.0, 0)]
)
def test_what_is_slower_than_noise_fails(monkeypatch, capsys, itself, this, fails):
    monkeypatch.setattr(sys, "argv", ["builds.py", str(HERE), "--sizes", "4K"])
    monkeypatch.setattr(builds, "measure", lambda paths, cases, args: ((case, [2.0, itself, this]) for case in cases))
    with pytest.raises(SystemExit) as ended:
        builds.main()
    assert int(ended.value.code) == fails
    assert f"| call | ordinary | 4 KiB | 2.00 | {this:.2f} | {2 / this:.2f} |" in capsys.readouterr().out
