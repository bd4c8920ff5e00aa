"""What drives the tests and measurements on a GPU (tests/gpu/check.py), where there is none: parts that fail or hang,
time that runs out, and the page."""

from __future__ import annotations

import importlib
import lzma
import os
import pathlib
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"
sys.path.append(str(GPU))
check, goals, machine, page, parts = map(importlib.import_module, ("check", "goals", "machine", "page", "parts"))

OF_RUN = parts.Record(when="today", commit="abc", device="GPU 1")


@pytest.fixture
def logs(tmp_path):
    return parts.Logs(tmp_path, "GPU 1")


def part(name, *programs, seconds=20, lacks=""):
    """A part whose commands are Python programs."""

    def act(running):
        for program in programs:
            running.run(sys.executable, "-S", "-c", program)

    return parts.Part(name, seconds, act, dict(os.environ), lambda: lacks)


def carry_out(some, logs, seconds=60.0, show=lambda not_run: None, grace=0.2, of_run=OF_RUN):
    return parts.carry_out(some, logs, of_run, time.monotonic() + seconds, show=show, grace=grace)


def outcomes(some, logs):
    return {one.name: (logs.record(one.name) or parts.Record()).outcome for one in some}


def kept(logs, name, text, **record):
    """A log of a part as an earlier run would have left it."""
    logs.log(name).write_text(text)
    logs.keep(name, replace(OF_RUN, rc=0, seconds=1.0) if not record else replace(OF_RUN, **record))


# ---- parts


def test_no_part_stops_another(logs):
    def stumble(running):
        raise OSError("no such thing")

    some = [
        part("good", "print('said')"),
        part("bad", "import sys; print('half a line', end=''); sys.exit(3)", "print('the second')"),
        part("killed", "import os; os.kill(os.getpid(), 9)"),
        parts.Part("absent", 5, lambda running: running.run("/nonexistent/program"), {}),
        parts.Part("stumbling", 5, stumble, {}),
        part("lacking", "print('never')", lacks="no gpu_check"),
        part("last"),
    ]
    assert carry_out(some, logs) == {"lacking": "no gpu_check"}
    assert outcomes([one for one in some if one.name != "lacking"], logs) == {
        "good": "passed",
        "bad": "failed: ended with 3",
        "killed": "failed: ended by SIGKILL",
        "absent": "failed: ended with 127",
        "stumbling": "failed: ended with 127",
        "last": "passed",
    }
    assert logs.record("lacking") is None and not logs.log("lacking").exists()
    assert "\nsaid\n" in logs.text("good")
    assert "half a line\nended with 3\n" in logs.text("bad") and "the second" in logs.text("bad")
    assert "could not be started" in logs.text("absent") and "no such thing" in logs.text("stumbling")


def test_a_part_that_hangs_is_ended_with_all_its_processes(logs):
    # What is ignored is so in children, too; one of them leaves the session.
    program = "trap '' TERM; sleep 60 & echo $!; setsid sleep 60 & echo $!; echo $$; wait"
    stuck = parts.Part("stuck", 1, lambda running: running.run("sh", "-c", program), dict(os.environ))
    started = time.monotonic()
    carry_out([stuck, part("after")], logs)
    assert time.monotonic() - started < 10
    assert outcomes([stuck, part("after")], logs) == {"stuck": "ended at its limit of 1 s", "after": "passed"}
    said = logs.text("stuck").splitlines()
    assert said[-1] == "ended at its limit of 1 s"
    pids = [int(line) for line in said if line.isdigit()]
    assert len(pids) == 3 and not set(pids) & parts.running_processes().keys()


def test_a_part_at_its_limit_may_say_its_last_words(logs):
    program = "trap 'echo final error; exit 0' TERM; sleep 60 & wait"
    slow = parts.Part("slow", 1, lambda running: running.run("sh", "-c", program), dict(os.environ))
    carry_out([slow], logs, grace=5)
    assert "final error\n" in logs.text("slow") and not logs.record("slow").passed


def test_what_a_command_leaves_behind_is_ended(logs):
    leaving = parts.Part("leaving", 5, lambda running: running.run("sh", "-c", "sleep 60 & echo $!"), dict(os.environ))
    carry_out([leaving], logs)
    assert logs.record("leaving").passed
    assert int(logs.text("leaving").split()[-1]) not in parts.running_processes()


def test_a_part_gets_what_is_left_of_the_time(logs, monkeypatch):
    assert carry_out([part("late", "print(1)")], logs, seconds=5) == {"late": "no time left"}
    assert not logs.log("late").exists()
    monkeypatch.setattr(parts, "LEAST", 0.5)
    some = [part("long", "import time; time.sleep(60)"), part("late", "print(1)")]
    assert carry_out(some, logs, seconds=1.2) == {"late": "no time left"}
    assert logs.record("long").note == "ended at its limit of 1 s"


def test_commands_of_a_part_share_its_time(logs):
    def act(running):
        running.run("sleep", "60", leave=1.5)
        running.run("echo", "second")
        running.run("sleep", "60")
        running.run("echo", "fourth")
        running.run("echo", "beyond", beyond=5)

    carry_out([parts.Part("shared", 2, act, dict(os.environ))], logs, grace=0.1)
    said = logs.text("shared").splitlines()
    assert "second" in said and "fourth" not in said and "beyond" in said
    assert logs.record("shared").rc == parts.ENDED and not logs.record("shared").failed


# ---- the page


def shown(some, logs, when="today"):
    return page.Page("GPU 1", "2026-01-02", [("GPU", "GPU 1")], some, logs, when)


def test_the_page_is_there_before_and_after_every_part(logs, tmp_path):
    path, seen = tmp_path / "results" / "page.md", []

    def look(running):
        seen.append(path.read_text())
        running.run("echo", "looked")

    some = [part("first", "print('the first said')"), parts.Part("look", 5, look, dict(os.environ)), part("never")]
    assert carry_out(some[:2], logs, show=check.shower(shown(some, logs), path)) == {}
    assert len(seen) == 1 and seen[0].startswith("# GPU check on GPU 1, 2026-01-02\n")
    assert "the first said" in seen[0] and "| first | passed |" in seen[0] and "| look | not run |" in seen[0]
    now = path.read_text()
    assert "looked\n" in now and "| look | passed |" in now and "| never | not run |" in now
    assert [file.name for file in path.parent.iterdir()] == ["page.md"]


def broken_pipe(*words, **options):
    raise BrokenPipeError


def test_a_page_that_cannot_be_written_ends_nothing(logs, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    some = [part("a"), part("b")]
    carry_out(some, logs, show=check.shower(shown(some, logs), tmp_path / "file" / "page.md"))
    assert outcomes(some, logs) == {"a": "passed", "b": "passed"} and "Error" in capsys.readouterr().out

    path = tmp_path / "page.md"
    page.write(path, "of before")
    monkeypatch.setattr(page.Page, "text", lambda self: 1 / 0)
    monkeypatch.setattr("builtins.print", broken_pipe)
    assert carry_out(some, logs, show=check.shower(shown(some, logs), path)) == {}
    assert path.read_text() == "of before"


def test_a_second_run_adds_to_the_first(logs):
    a, b, c = part("a", "print('first a')"), part("b", "print('first b')"), part("c", "print('first c')")
    carry_out([a, b, c], logs)
    again = replace(OF_RUN, when="tomorrow", commit="def")
    a, c = part("a", "print('second a')"), part("c", lacks="no NCCL")
    not_run = carry_out([a, c], logs, of_run=again)
    second = shown([a, b, c], logs, "tomorrow")
    second.not_run = not_run
    text = second.text()
    assert "second a" in text and "first b" in text and "first c" in text and "first a" not in text
    assert "| a | passed | " in text and "| b | earlier: passed | " in text and "today, commit abc" in text
    assert "| c | not run: no NCCL; earlier: passed | " in text
    # Logs of another GPU are not this one's.
    other = page.Page("GPU 2", "2026-01-02", [], [b], parts.Logs(logs.folder, "GPU 2")).text()
    assert "first b" not in other and "| b | not run |" in other


def test_a_log_is_shortened_and_harmless_on_a_page(logs):
    lines = [f"line {number}" for number in range(1000)]
    kept(logs, "long", "\n".join(lines))
    text = shown([part("long")], logs).text()
    assert "line 59\n... 800 lines left out ...\nline 860\n" in text and "line 999\n" in text
    home = "/".join(["", "home", "somebody", "lib", "x.so"])
    kept(logs, "odd", f"```\n[x](y)\n{ROOT}/csrc/a.cc:7\n{home}: error\n" + "w" * 9999)
    text = shown([part("odd")], logs).text()
    assert "'''\n[x] (y)\ncsrc/a.cc:7\n.../x.so: error\n" in text and text.count("```") == 2 and "w" * 501 not in text


def test_the_page_tells_the_variables_of_parts(logs):
    one, two, three = (
        replace(part(name), environment={"PATH": "/bin", "NCCL_DEBUG": value})
        for name, value in (("one", "WARN"), ("two", "INFO"), ("three", "WARN"))
    )
    text = shown([one, two, three], logs).text()
    assert "| one, three | NCCL_DEBUG=WARN |" in text and "| two | NCCL_DEBUG=INFO |" in text and "/bin" not in text


# ---- what the parts are made from


@pytest.fixture
def setup(logs, tmp_path):
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": "/of/the/user", "LD_PRELOAD": "/a.so"}
    return check.Setup(base, tmp_path / "build", logs, pathlib.Path("/nccl/libnccl.so.2"))


def test_every_part_has_the_environment_that_it_needs(setup):
    of = {one.name: one.environment for one in check.all_parts(setup)}
    for name, ctas in (("nccl", "8"), ("nccl-speed", "8"), ("pull-speed", "16")):
        assert of[name]["NCCL_MAX_CTAS"] == ctas
    for name in ("messages", "bench-small", "bench-large"):
        assert of[name]["NCCL_MAX_CTAS"] == "2" and of[name]["LD_PRELOAD"] == "/nccl/libnccl.so.2:/a.so"
        assert "CUDA_MODULE_LOADING" not in of[name]
    assert of["peers"]["RINGLET_NCCL_LIBRARY"] == "/nonexistent" and of["peers"]["LD_PRELOAD"] == "/a.so"
    assert of["messages"]["PYTHONPATH"] == f"{ROOT / 'python'}:/of/the/user"
    assert of["kernels"]["CUDA_MODULE_LOADING"] == "EAGER"
    assert of["sanitizer"]["CUDA_MODULE_LOADING"] == "LAZY" and "LD_PRELOAD" not in of["sanitizer"]
    assert of["build"] == setup.base
    assert all(one["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" for name, one in of.items() if name != "build")


def test_what_a_user_has_set_stays(setup):
    own = {"NCCL_MAX_CTAS": "3", "NCCL_DEBUG": "INFO", "CUDA_MODULE_LOADING": "LAZY"}
    for one in check.all_parts(replace(setup, base=setup.base | own))[1:]:
        assert own.items() <= one.environment.items()


def test_parts_tell_what_they_lack(setup, tmp_path):
    def lacking(made):
        return {one.name: one.lacks() for one in check.all_parts(made) if one.lacks() and one.name != "sanitizer"}

    of_gpu_check = ["kernels", "bandwidth", "pull", "pull-speed", "nccl", "nccl-speed"]
    assert lacking(setup) == dict.fromkeys(of_gpu_check, "no gpu_check")
    setup.folder.mkdir()
    setup.gpu_check.write_text("")
    assert lacking(setup) == {}
    of_nccl = ["nccl", "nccl-speed", "messages", "bench-small", "bench-large"]
    assert lacking(replace(setup, nccl=None)) == dict.fromkeys(of_nccl, "no NCCL (RINGLET_NCCL_LIBRARY)")


class Stub:
    """Stands for a running part: keeps the commands, and answers as told."""

    def __init__(self, *statuses):
        self.commands, self._statuses = [], list(statuses)

    def run(self, *command, **limits):
        self.commands.append(" ".join(command))
        return self._statuses.pop(0)


def test_gpu_check_is_built_whatever_becomes_of_the_extension(setup):
    setup.folder.mkdir()
    (setup.folder / "build.ninja").write_text("")
    setup.gpu_check.write_text("of an earlier build")
    stub = Stub(0, 0)
    check.build(setup, stub)
    assert "setup.py" in stub.commands[0] and stub.commands[1].endswith("--target gpu_check")
    stub = Stub(1, 0)
    check.build(setup, stub)
    assert stub.commands[1].endswith("--target ringlet_cuda gpu_check -- -k 0") and setup.gpu_check.exists()
    check.build(setup, Stub(1, 1))
    assert not setup.gpu_check.exists()
    (setup.folder / "build.ninja").unlink()
    stub = Stub(1, 0, 0)
    check.build(setup, stub)
    assert "-DRINGLET_BINDINGS=OFF" in stub.commands[1]


def test_what_a_sweep_measured_is_shown_though_it_failed(setup):
    rows = setup.logs.rows_file("bench-small")
    rows.write_text("of an earlier run")
    stub = Stub(1)
    check.bench(setup, "bench-small", stub)
    assert not rows.exists() and len(stub.commands) == 1 and "--sweep gpu-small" in stub.commands[0]

    class Measuring(Stub):
        def run(self, *command, **limits):
            rows.write_text("{}")
            return super().run(*command, **limits)

    stub = Measuring(parts.ENDED, 0)
    check.bench(setup, "bench-small", stub)
    assert stub.commands[1].endswith(f"--from {rows}")
    stub = Measuring(0)
    check.bench(setup, "bench-small", stub)  # showed it itself


def test_nccl_may_be_packed(tmp_path):
    packed, unpacked = tmp_path / "libnccl.so.2.30.3.xz", tmp_path / "libnccl.so.2"
    packed.write_bytes(lzma.compress(b"an older library"))
    os.utime(packed, (8e8, 8e8))
    assert machine.nccl_library(str(packed), tmp_path).read_bytes() == b"an older library"
    packed.write_bytes(lzma.compress(b"a library"))
    os.utime(packed, (9e8, 9e8))
    assert machine.nccl_library(str(packed), tmp_path) == unpacked and unpacked.read_bytes() == b"a library"
    inode = unpacked.stat().st_ino
    assert machine.nccl_library(str(packed), tmp_path).stat().st_ino == inode  # once
    packed.write_bytes(lzma.compress(b"another")[:-9])
    os.utime(packed, (1e9, 1e9))
    for named in (None, "", str(tmp_path / "absent.so"), str(tmp_path / "absent.xz"), str(packed)):
        with pytest.raises(machine.NoNccl):
            machine.nccl_library(named, tmp_path)
    assert unpacked.read_bytes() == b"a library"
    assert machine.nccl_library(str(unpacked), tmp_path) == unpacked
    assert machine.nccl_version(unpacked) == "of unknown version"


# ---- the whole


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch):
    """check.main with parts of our own, where nvidia-smi tells of a GPU."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA X9 (80GB), 580.1, 81559 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("RINGLET_NCCL_LIBRARY", raising=False)
    monkeypatch.setenv("REPORT", str(tmp_path / "page.md"))

    def main(some, *words):
        monkeypatch.setattr(check, "all_parts", lambda setup: some)
        return check.main(["--logs", str(tmp_path / "logs"), *words])

    return main


def test_the_exit_status(on_a_gpu, tmp_path, capsys):
    good, bad = part("good", "print('well')"), part("bad", "print('the reason'); exit(1)")
    assert on_a_gpu([good]) == 0
    assert on_a_gpu([good, bad], "--parts", "good") == 0
    assert on_a_gpu([good, part("lacking", lacks="no tool")]) == 1
    capsys.readouterr()
    assert on_a_gpu([good, bad]) == 1
    told = capsys.readouterr().out
    assert "the reason\n" in told and "not measured: kernels" in told and told.endswith(f"{tmp_path / 'page.md'}\n")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# GPU check on NVIDIA X9 (80GB), ") and "| driver | 580.1 |" in text
    assert "| NCCL | none: RINGLET_NCCL_LIBRARY names none |" in text and "| bad | failed: ended with 1 |" in text
    with pytest.raises(SystemExit, match="goood"):
        on_a_gpu([good], "--parts", "goood")


def test_an_interrupt_leaves_a_page(on_a_gpu, tmp_path):
    def interrupted(running):
        running.run("echo", "begun")
        raise KeyboardInterrupt

    some = [part("a"), parts.Part("b", 5, interrupted, dict(os.environ)), part("c")]
    assert on_a_gpu(some) == 130
    text = (tmp_path / "page.md").read_text()
    assert "| a | passed |" in text and "| b | did not end" in text and "begun\n" in text
    assert "| c | not run: interrupted |" in text


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.main(["--logs", str(tmp_path)]) == 2
    assert "no nvidia-smi" in capsys.readouterr().err


def test_the_tests_that_goals_name_are_there_and_marked():
    collect = [sys.executable, "-m", "pytest", *check.PYTEST, "--collect-only", "-q", "-q", "-m"]
    both = {
        marker: subprocess.Popen([*collect, marker], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for marker in goals.PART_OF
    }
    found = {marker: process.communicate(timeout=60)[0] for marker, process in both.items()}
    wanted = {way: [name.format(way) for name in (*goals.CONTRACT, goals.GRAPH)] for way in goals.PART_OF}
    wanted["nccl"] += goals.TRAINING
    for marker, names in wanted.items():
        assert [name for name in names if f"::test_{name}\n" not in found[marker]] == []
    collected = [re.search(r"(\d+)/(\d+) tests collected", said) for said in found.values()]
    assert sum(int(match[1]) for match in collected) == int(collected[0][2])  # each is run by one part
