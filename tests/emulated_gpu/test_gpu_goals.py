"""What the GPU check makes of its logs (tests/gpu/goals.py): made-up ones, for there is no GPU."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
goals, parts = map(importlib.import_module, ("goals", "parts"))


@pytest.fixture
def logs(tmp_path):
    return parts.Logs(tmp_path)


def kept(logs, name, text, rc=0, note=""):
    """A part's log, and what became of it."""
    logs.log(name).write_text(text)
    logs.keep(name, parts.Record(rc, 1.0, note))


def verdict(logs, what):
    (found,) = [goal.verdict(logs) for goal in goals.goals() if what in goal.what]
    return goals.met(found[1]), found[0]


def test_nothing_is_met_before_anything_ran(logs):
    assert {goals.met(goal.verdict(logs)[1]) for goal in goals.goals()} == {"not measured"}


CUT = {"rc": parts.ENDED, "note": "ended at its limit of 9 s"}
SHARE = "sum of two of float32, 256 MiB\t{}\tof the copy's bandwidth\ngpu_check: {}\n"
RATIO = "{}, {} virtual ranks, {} B: ncclAllReduce's time\t{}\tof ringlet's\n"
SMALL = RATIO.format("one_shot", 2, 256, 3) + RATIO.format("one_shot", 4, 262144, "1.01")
SMALL += RATIO.format("one_shot", 2, 1 << 20, 0.5) + RATIO.format("two_shot", 2, 256, 0.5)
LARGE = RATIO.format("ring", 2, 64 << 20, 0.95) + RATIO.format("ring", 2, 1 << 20, 0.1)
LARGER = RATIO.format("ring", 4, 256 << 20, "{}")
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"


@pytest.mark.parametrize(
    ("what", "name", "text", "record", "wanted"),
    [
        ("kernels: every", "kernels", "x\ngpu_check: ok\n", {}, MET),
        ("kernels: every", "kernels", "gpu_check: FAILED\n", {"rc": 1}, NOT_MET),
        ("kernels: every", "kernels", "some lines\n", {"rc": -11}, NOT_MET),
        ("kernels: every", "kernels", "some lines\n", CUT, NOT_MEASURED),
        ("kernels: every", "kernels", "no driver\n", {"rc": 2}, NOT_MEASURED),
        ("engine: contract, worlds 2 3 4 8", "pull", "pull: cases\t612\tx\ngpu_check: ok\n", {}, MET),
        ("messages: contract, worlds 2 3 4, one", "nccl", "gpu_check: FAILED\n", CUT, NOT_MET),
        ("float32", "bandwidth", SHARE.format(0.9, "ok"), {}, MET),
        ("float32", "bandwidth", SHARE.format(0.899, "ok"), {}, NOT_MET),
        ("float32", "bandwidth", SHARE.format("nan", "ok"), {}, NOT_MET),
        ("float32", "bandwidth", SHARE.format(0.95, "FAILED"), {"rc": 1}, NOT_MEASURED),
        ("float32", "bandwidth", SHARE.format(0.5, "FAILED"), {"rc": 1}, NOT_MET),
        ("bfloat16", "bandwidth", SHARE.format(0.95, "ok"), {}, NOT_MEASURED),
        ("one_shot", "pull-speed", SMALL, {}, MET),
        ("one_shot", "pull-speed", SMALL, CUT, NOT_MEASURED),
        ("one_shot", "pull-speed", SMALL + RATIO.format("one_shot", 3, 4096, 1), CUT, NOT_MET),
        ("one_shot", "pull-speed", SMALL, {"rc": 1}, NOT_MEASURED),
        ("one_shot", "pull-speed", "gpu_check: ok\n", {}, NOT_MEASURED),
        ("ring over", "nccl-speed", LARGE + LARGER.format(0.9), CUT, MET),
        ("ring over", "nccl-speed", LARGE + LARGER.format(0.89), {}, NOT_MET),
        ("ring over", "nccl-speed", LARGE + LARGER.format(1.5), {"rc": 1}, NOT_MEASURED),
        ("ring over", "nccl-speed", LARGE, {}, NOT_MEASURED),
        ("sanitizer", "sanitizer", "", {}, MET),
        ("sanitizer", "sanitizer", "", {"rc": 9, "note": "ended at its limit of 9 s"}, NOT_MET),
        ("sanitizer", "sanitizer", "", CUT, NOT_MEASURED),
        ("sanitizer", "sanitizer", "========= Error: Device not supported\n", {"rc": 9}, NOT_MEASURED),
    ],
)
def test_a_goal_is_judged_by_a_log(logs, what, name, text, record, wanted):
    kept(logs, name, text, **record)
    assert verdict(logs, what)[0] == wanted


def test_figures_are_told_with_where_they_are_from(logs):
    kept(logs, "pull-speed", SMALL)
    assert verdict(logs, "one_shot") == (MET, "1.010 (4 ranks, 256 KiB)")
    kept(logs, "pull-speed", SMALL + RATIO.format("one_shot registered", 2, 256, 0.5))
    assert verdict(logs, "one_shot") == (MET, "1.010 (4 ranks, 256 KiB); registered 0.500 (2 ranks, 256 B)")
    kept(logs, "pull", "a: cases\t600\tx\nb: cases\t12\tx\ngpu_check: ok\n")
    assert verdict(logs, "contract, worlds 2 3 4 8") == (MET, "ok, 612 cases")
    rows = [
        {"library": library, "algorithm": algorithm, "bytes": size, "round": round_, "time_us_p50": time_us}
        for size, ours in ((64 << 20, (100, 100, 100)), (256 << 20, (100, 200, 125)))
        for round_, own in enumerate(ours)
        for library, algorithm, time_us in (("ringlet", "ring", own), ("nccl", "default", 100))
    ]
    kept(logs, "bench-large", "")
    logs.rows_file("bench-large").write_text("\n".join(map(json.dumps, rows)) + '\n{"half')
    beside = "processes in time slices: 0.800 (2 ranks, 256 MiB)"
    assert verdict(logs, "ring over") == (NOT_MEASURED, beside)
    kept(logs, "nccl-speed", LARGE + LARGER.format(1.5))
    assert verdict(logs, "ring over") == (MET, f"0.950 (2 ranks, 64 MiB); {beside}")


def verbose(names, outcome="PASSED"):
    return "".join(f"tests/gpu/test_cuda.py::test_{name} {outcome}    [ 10%]\n" for name in names)


def test_tests_are_judged_by_their_lines(logs):
    names = [name.format("nccl") for name in goals.CONTRACT]
    what, graph = "messages: contract, worlds 2 3 4, ranks", "graph replayed"
    kept(logs, "messages", verbose(names[:4]), **CUT)
    assert verdict(logs, what) == (NOT_MEASURED, "4 of 6 tests passed, 0 failed")
    kept(logs, "messages", verbose([*names, *goals.TRAINING]))
    assert verdict(logs, what)[0] == verdict(logs, "training")[0] == MET
    kept(logs, "messages", verbose(names) + verbose(names[:1], "ERROR"), rc=1)
    assert verdict(logs, what) == (NOT_MET, "5 of 6 tests passed, 1 failed")
    kept(logs, "messages", verbose([goals.GRAPH.format("nccl")]))
    assert verdict(logs, graph)[0] == NOT_MEASURED
    kept(logs, "peers", verbose([goals.GRAPH.format("peers")]))
    assert verdict(logs, graph)[0] == MET
