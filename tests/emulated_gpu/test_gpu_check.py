"""What drives the tests and measurements on a GPU (tests/gpu/check.py), where there is none: parts that fail or hang,
time that runs out, and what its summary makes of made-up logs."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))
check, summary = map(importlib.import_module, ("check", "summary"))


def part(name, *programs, seconds=20.0, half="virtual", nccl=False):
    """A part whose commands are Python programs."""
    commands = tuple((sys.executable, "-S", "-c", program) for program in programs)
    return check.Part(name, half, seconds, commands, nccl)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Where check.py keeps its logs; with nvidia-smi, which tells of a GPU, and parts of our own."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA X9 (80GB), 580.1, 81559 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("RINGLET_NCCL_LIBRARY", raising=False)
    monkeypatch.setenv("REPORT", str(tmp_path / "page.md"))
    monkeypatch.setattr(check, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(check, "GRACE", 0.2)
    return tmp_path / "logs"


@pytest.fixture
def main(logs, monkeypatch):
    def run(some, *words):
        monkeypatch.setattr(check, "parts", lambda: some)
        return check.main(list(words))

    return run


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- parts


def test_no_part_stops_another(main, logs, tmp_path, capsys):
    some = [
        part("good", "print('said')"),
        part("bad", "import sys; print('the reason'); sys.exit(3)", "print('never')"),
        part("killed", "import os; os.kill(os.getpid(), 9)"),
        check.Part("absent", "virtual", 5, (("/nonexistent/program",),)),
        part("lacking", "print('never')", nccl=True),
        part("last", "pass"),
    ]
    assert main(some) == 1
    told = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert told[:6] == [
        "good: passed",
        "bad: failed: ended with 3",
        "killed: failed: ended with -9",
        "absent: failed: ended with 127",
        "lacking: no NCCL (RINGLET_NCCL_LIBRARY)",
        "last: passed",
    ]
    assert "never" not in summary.text_of(logs, "bad") and summary.record_of(logs, "lacking") == {}
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# GPU check on NVIDIA X9 (80GB), ") and "| driver | 580.1 |" in page
    assert "the reason\n" in page and "| lacking | not run |" in page and "| bad | failed: ended with 3" in page


def test_exit_statuses(main, monkeypatch, tmp_path, capsys):
    assert main([part("good", "pass"), part("bad", "exit(1)")], "good") == 0
    assert main([part("good", "pass"), part("bad", "exit(1)")]) == 1
    with pytest.raises(SystemExit, match="goood: no such part; there are virtual, ranks, good"):
        main([part("good", "pass")], "goood")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupted)
    assert main([part("good", "pass")]) == 130 and (tmp_path / "page.md").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.main([]) == 2 and "no nvidia-smi" in capsys.readouterr().err


def test_a_part_that_hangs_is_ended_with_all_its_processes(main, logs, monkeypatch):
    monkeypatch.setattr(check, "LEAST", 0.5)
    # What is ignored is so in children, too; one of them leaves the session.
    program = "trap '' TERM; sleep 60 & echo $!; setsid sleep 60 & echo $!; echo $$; wait"
    stuck = check.Part("stuck", "virtual", 1.0, (("sh", "-c", program),))
    leaving = check.Part("leaving", "virtual", 5.0, (("sh", "-c", "sleep 60 & echo $!"),))
    started = time.monotonic()
    assert main([stuck, leaving]) == 1
    assert time.monotonic() - started < 15
    assert summary.outcome(summary.record_of(logs, "stuck")).startswith("ended at its limit")
    assert summary.outcome(summary.record_of(logs, "leaving")).startswith("passed")
    pids = [
        int(line) for name in ("stuck", "leaving") for line in summary.text_of(logs, name).split() if line.isdigit()
    ]
    pids = [pid for pid in pids if pid > 99]  # not the commands' own numbers
    assert len(pids) == 4 and not any(map(alive, pids))


def test_parts_share_the_time_of_a_half(main, logs, monkeypatch, capsys):
    monkeypatch.setenv("LIMIT", "1.5")
    monkeypatch.setattr(check, "LEAST", 0.7)
    assert main([part("long", "import time; time.sleep(60)"), part("late", "print(1)")]) == 1
    told = capsys.readouterr().out
    assert "long: ended at its limit" in told and "late: no time left" in told and not (logs / "late.log").exists()


def test_a_second_call_keeps_the_other_parts(main, logs, tmp_path):
    home = "/".join(["", "home", "somebody", "lib", "x.so"])
    odd = f"```\n[x](y)\n{ROOT}/csrc/a.cc:7\n{home}: e\n"
    assert main([part("a", "print('first a')"), part("b", f"print('first b')\nprint({odd!r})")]) == 0
    assert main([part("a", "print('second a')"), part("b", "print('second b')")], "a") == 0
    page = (tmp_path / "page.md").read_text()
    assert "second a" in page and "first b" in page and "first a" not in page
    assert "'''\n[x] (y)\ncsrc/a.cc:7\n.../x.so: e\n" in page  # harmless in a fence of a page whose links are checked


# ---- what the parts are made from


def test_both_halves_fit_their_time():
    for half in ("virtual", "ranks"):
        seconds = sum(one.seconds for one in check.chosen([half]))
        assert seconds <= check.SECONDS, half
    names = [one.name for one in check.chosen(["virtual"])]
    assert names[:2] == ["build", "smoke"] and [one.name for one in check.chosen(["ranks"])][1] == "ipc-smoke"


def test_nccl_may_be_packed(logs, tmp_path, monkeypatch):
    logs.mkdir()
    packed = tmp_path / "libnccl.so.2.30.3.xz"
    for when, content in ((8e8, b"an older library"), (9e8, b"a library")):
        packed.write_bytes(lzma.compress(content))
        monkeypatch.setenv("RINGLET_NCCL_LIBRARY", str(packed))
        if (logs / "libnccl.so.2").exists():
            os.utime(logs / "libnccl.so.2", (8e8, 8e8))
        os.utime(packed, (when, when))
        assert check.nccl_library() == logs / "libnccl.so.2"
        assert check.nccl_library().read_bytes() == content
    monkeypatch.setenv("RINGLET_NCCL_LIBRARY", str(logs / "libnccl.so.2"))
    assert check.nccl_library() == logs / "libnccl.so.2"
    monkeypatch.setenv("RINGLET_NCCL_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(SystemExit, match=r"names .*absent\.so, and there is no such file"):
        check.nccl_library()
    monkeypatch.delenv("RINGLET_NCCL_LIBRARY")
    assert check.nccl_library() is None


def test_the_tests_that_goals_name_are_there_and_each_is_run_by_one_part():
    markers = {"ipc-smoke": "smoke", "threads": "threads", "processes": "processes", "messages": "nccl"}
    collect = [*check.PYTEST[:-1], "--collect-only", "-q", "-q", "-m"]
    running = {
        name: subprocess.Popen([*collect, marker], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name, marker in (*markers.items(), ("all", "smoke or threads or processes or nccl or not smoke"))
    }
    found = {name: process.communicate(timeout=90)[0].splitlines() for name, process in running.items()}
    tests = {name: {line for line in lines if "::test_" in line} for name, lines in found.items()}
    for wanted_part, names in summary.TESTED.values():
        assert {f"tests/gpu/test_cuda.py::test_{name}" for name in names} <= tests[wanted_part]
    assert sum(len(tests[name]) for name in markers) == len(tests["all"]) > 0


# ---- what must be shown


def kept(logs, name, text, status=0):
    """A part's log, and what became of it."""
    logs.mkdir(exist_ok=True)
    (logs / f"{name}.log").write_text(text)
    (logs / f"{name}.json").write_text(json.dumps({"status": status, "seconds": 1.0, "commit": "abc"}))


def verdict(logs, what):
    (found,) = [goal for goal in summary.goals(logs) if what in goal.what]
    return found.verdict(), found.figure


CUT = check.ENDED
SHARE = "sum of two of float32, 256 MiB\t{}\tof the copy's bandwidth\ngpu_check: {}\n"
RATIO = "{}, {} virtual ranks, {} B: ncclAllReduce's time\t{}\tof ringlet's\n"


def by(way, text):
    return text.replace("time\t", f"time{way}\t")


SMALL = "".join(RATIO.format("one_shot", 2, 4**k, 3) for k in range(4, 9)) + RATIO.format("one_shot", 4, 262144, "1.01")
SMALL += RATIO.format("one_shot", 2, 1 << 20, 0.5) + RATIO.format("two_shot", 2, 256, 0.5)
CHOSEN = SMALL
SMALL += by(" by Ring, LL", SMALL.replace("1.01", "1.02")) + by(" by Ring, LL128", SMALL.replace("1.01", "1.03"))
LARGE = RATIO.format("ring", 2, 64 << 20, 0.85) + RATIO.format("ring", 2, 1 << 20, 0.1)
LARGER = RATIO.format("ring", 4, 256 << 20, "{}")
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"


@pytest.mark.parametrize(
    ("what", "name", "text", "status", "wanted"),
    [
        ("kernels: every", "kernels", "x\ngpu_check: ok\n", 0, MET),
        ("kernels: every", "kernels", "gpu_check: FAILED\n", 1, NOT_MET),
        ("kernels: every", "kernels", "some lines\n", CUT, NOT_MEASURED),
        ("memory: contract, worlds 2 3 4 8", "pull", "pull: cases\t612\tx\ngpu_check: ok\n", 0, MET),
        ("messages: contract, worlds 2 3 4, one", "nccl", "gpu_check: FAILED\n", CUT, NOT_MET),
        ("float32", "bandwidth", SHARE.format(0.9, "ok"), 0, MET),
        ("float32", "bandwidth", SHARE.format(0.899, "ok"), 0, NOT_MET),
        ("float32", "bandwidth", SHARE.format(0.95, "FAILED"), 1, NOT_MEASURED),
        ("float32", "bandwidth", SHARE.format(0.5, "FAILED"), 1, NOT_MET),
        ("one_shot", "pull-speed", SMALL, 0, MET),
        ("one_shot", "pull-speed", SMALL, CUT, NOT_MEASURED),
        ("one_shot", "pull-speed", CHOSEN, 0, NOT_MEASURED),
        ("one_shot", "pull-speed", SMALL + by(" by Ring, LL", RATIO.format("one_shot", 2, 4096, 0.9)), 0, NOT_MET),
        ("one_shot", "pull-speed", SMALL + RATIO.format("one_shot", 3, 4096, 0.9), CUT, NOT_MET),
        ("ring over", "nccl-speed", LARGE + LARGER.format(0.8), 0, MET),
        ("ring over", "nccl-speed", LARGE + LARGER.format(0.79), 0, NOT_MET),
        ("sanitizer", "sanitizer", "", 0, MET),
        ("sanitizer", "sanitizer", "", 9, NOT_MET),
        ("sanitizer", "sanitizer", "", CUT, NOT_MEASURED),
        ("sanitizer", "sanitizer", "========= Error: Device not supported\n", 9, NOT_MEASURED),
    ],
)
def test_a_goal_is_judged_by_a_log(logs, what, name, text, status, wanted):
    assert {goal.verdict() for goal in summary.goals(logs)} == {NOT_MEASURED}  # before anything ran
    kept(logs, name, text, status)
    assert verdict(logs, what)[0] == wanted


def verbose(names, outcome="PASSED"):
    return "".join(f"tests/gpu/test_cuda.py::test_{name} {outcome}    [ 10%]\n" for name in names)


def test_tests_are_judged_by_their_lines(logs):
    threads, training = summary.TESTED[next(iter(summary.TESTED))][1], summary.TRAINING
    kept(logs, "threads", verbose(threads[:2]), CUT)
    assert verdict(logs, "ranks as threads") == (NOT_MEASURED, "2 of 3 tests")
    kept(logs, "messages", verbose(training))
    assert verdict(logs, "training")[0] == MET
    kept(logs, "threads", verbose(threads) + verbose(threads[:1], "ERROR"), 1)
    assert verdict(logs, "ranks as threads") == (NOT_MET, "2 of 3 tests")


def test_the_page_tells_figures_versions_and_channels(logs):
    kept(logs, "pull-speed", SMALL)
    assert verdict(logs, "one_shot") == (MET, "1.010 (4 ranks, 262144 B)")
    kept(logs, "smoke", "cuda\truntime 13000, driver 13010\n")
    kept(logs, "messages", "r:1:2 [0] NCCL INFO 8 coll channels, 8 collnet channels\nNCCL version 2.30.7+cuda13.3\n")
    text = summary.page(logs, ["smoke", "messages"])
    assert "| CUDA | runtime 13000, driver 13010 |" in text and "| NCCL | 2.30.7+cuda13.3 |" in text
    assert "| NCCL's channels | 8 coll channels, 8 collnet channels |" in text
