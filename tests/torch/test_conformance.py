"""The runner of torch's own suite (tests/conformance): which gates it opens, and what it takes for conforming."""

import importlib.util
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "conformance"))
import gates
import results

SUITE = "torch.testing._internal.distributed.distributed_test"


def row(test: str, outcome: str, why: str = "", world: int = 2) -> results.Row:
    return {"test": test, "world": world, "outcome": outcome, "why": why}


def test_shortcomings_are_failures_and_skips_without_an_excuse():
    reference = [row("a", "ok"), row("b", "ok", world=4), row("c", "failed"), row("d", "skipped", "CUDA is missing")]
    rows = [
        row("a", "skipped", "no GPU here"),
        row("b", "ok", world=4),
        row("c", "failed", "ValueError: no"),
        row("d", "skipped", "Only Nccl supports it"),
        row("e", "skipped", "Test requires backend ringlet to be one of {'mpi'}"),
        row("f", "skipped", "Skipped due to small world size."),
    ]
    found = results.shortcomings(rows, reference)
    assert [text.split()[0] for text in found] == ["a", "c", "e"]
    assert "gloo passes it" in found[0] and "ValueError: no" in found[1] and "without an excuse" in found[2]


def evaluated(source: str, backend: str) -> dict:
    """The names of a module that the suite's gates stand in, for a backend."""

    def skipped(condition, reason):
        return lambda function: None if condition else function

    names = {
        "BACKEND": backend,
        gates.SKIP: skipped,
        "require_backend_is_available": lambda backends: skipped(backend not in backends, ""),
        "open_gate": gates.open_gate,
        "open_name": gates.open_name,
    }
    exec(gates.opened(source, "suite.py"), names)
    return names


MODULE = """
import os
PROFILING_SUPPORTED_BACKENDS = ["gloo"]

@skip_but_pass_in_sandcastle_if(BACKEND != "mpi", "Only MPI")
def test_of_mpi(x: int): return 1 if BACKEND == "mpi" or BACKEND == "gloo" else 2

@require_backend_is_available({"gloo"})
def test_of_gloo(x: int):
    if BACKEND == "mpi" or BACKEND == "gloo":
        return 1
    return 2

@skip_but_pass_in_sandcastle_if(BACKEND != "nccl", "Only NCCL")
def test_of_nccl(x: int): return 3
"""


def test_gates_open_for_cpu_backends_and_note_whom_they_kept_out(monkeypatch):
    monkeypatch.setenv("BACKEND", "other")
    other, gloo = evaluated(MODULE, "other"), evaluated(MODULE, "gloo")
    assert getattr(other["test_of_mpi"], gates.NOTE) == getattr(gloo["test_of_mpi"], gates.NOTE) == "Only MPI"
    assert getattr(other["test_of_gloo"], gates.NOTE) == "Test requires gloo"
    assert not hasattr(gloo["test_of_gloo"], gates.NOTE)
    assert other["test_of_gloo"](0) == 1, "the branch of CPU backends"
    assert other["test_of_nccl"] is None, "a test that needs GPUs stays out"
    assert other["PROFILING_SUPPORTED_BACKENDS"] == ["gloo", "other"]
    # torch reads annotations as they are; those of a module under `from __future__ import annotations` are text.
    assert other["test_of_mpi"].__annotations__["x"] is int


def test_a_suite_without_known_gates_is_refused():
    with pytest.raises(ValueError, match=r"suite\.py has none of the gates"):
        evaluated("BACKEND = 'other'", "other")


def test_gates_are_found_in_torchs_suite():
    found = gates.Gates()
    source = pathlib.Path(importlib.util.find_spec(SUITE).origin).read_text(encoding="utf-8")
    found.visit(gates.ast.parse(source))
    assert found.opened > 40


def test_the_stored_results_conform():
    assert not results.shortcomings(results.read(results.RESULTS), results.read(results.REFERENCE))
    for world in (2, 4):
        kept_out = [
            one for one in results.read(results.REFERENCE) if "all_to_all" in one["test"] and one["world"] == world
        ]
        ours = {one["test"]: one["outcome"] for one in results.read(results.RESULTS) if one["world"] == world}
        assert {ours[one["test"]] for one in kept_out if one["outcome"] != "skipped"} == {"ok"}
