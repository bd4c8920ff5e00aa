"""The runner of torch's own suite (tests/conformance): which gates it opens, and what it takes for conforming."""

import importlib.util
import pathlib
import sys

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
