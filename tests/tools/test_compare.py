"""benchmarks/compare.py, on made-up results: it fails when ringlet has become slower, and not for noise or drift."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS, SIZES = 5, (1024, 1 << 20)
# By round: what a quiet and a noisy machine make of the same time.
QUIET, NOISY = (1.0, 1.01, 0.99, 1.02, 0.98), (1.0, 1.6, 0.7, 1.3, 0.8)

Scale = Callable[[str, int], float]


def rows(
    scale: Scale, noise: tuple[float, ...] = QUIET, peers: tuple[str, ...] = ("gloo",)
) -> Iterator[dict[str, Any]]:
    """`scale(library, bytes)` is what a time is multiplied by."""
    for round_ in range(ROUNDS):
        for library in ("ringlet", *peers):
            for size in SIZES:
                yield {
                    "library": library, "collective": "all_reduce", "algorithm": "auto", "transport": "shared_memory",
                    "memory": "ordinary", "via": "api", "world": 2, "bytes": size, "dtype": "float32", "op": "sum",
                    "round": round_, "wrong": 0,
                    "time_us_p50": 10 * scale(library, size) * (noise[round_] if library == "ringlet" else 1.0),
                }  # fmt: skip


@pytest.fixture
def compared(tmp_path):
    """Exit code and output of the script on two runs."""

    def run(old: Iterator[dict[str, Any]], new: Iterator[dict[str, Any]], *words: str) -> tuple[int, str]:
        for name, made in (("old", old), ("new", new)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        script = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "old.jsonl", "new.jsonl", *words]
        done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return run


def even(library: str, size: int) -> float:
    return 1.0


def slow_ringlet(library: str, size: int) -> float:
    return 1.5 if library == "ringlet" else 1.0


def slow_machine(library: str, size: int) -> float:
    return 2.0


def test_a_regression_fails(compared):
    code, told = compared(rows(even), rows(slow_ringlet))
    assert code == 1 and "geometric mean" in told and "0.667x  SLOWER" in told
    assert compared(rows(slow_ringlet), rows(even))[0] == 0, "faster is no regression"
    assert compared(rows(even), rows(slow_ringlet), "--tolerance", "0.6")[0] == 0


def test_drift_divides_out_and_a_regression_beside_a_peer_does_not(compared):
    relative = ("--relative-to", "openmpi,gloo")
    assert compared(rows(even), rows(slow_machine))[0] == 1
    code, told = compared(rows(even), rows(slow_machine), *relative)
    assert code == 0 and "relative to gloo" in told
    assert compared(rows(even), rows(slow_ringlet), *relative)[0] == 1
    # The same times, and a peer that has become faster: the machine has, and ringlet has not followed.
    assert compared(rows(even), rows(lambda library, size: 1.0 if library == "ringlet" else 0.5), *relative)[0] == 1


def test_noise_is_no_regression(compared):
    code, told = compared(rows(even, NOISY), rows(lambda library, size: 1.2, NOISY))
    assert code == 0 and "0.833x" in told, "the rounds of the two runs overlap"
    assert compared(rows(even), rows(lambda library, size: 1.2))[0] == 1, "the same slowdown on a quiet machine"


def test_one_case(compared):
    def slow_at_one_size(library: str, size: int) -> float:
        return 1.15 if size == SIZES[0] else 1.0

    assert compared(rows(even), rows(slow_at_one_size))[0] == 0, "within the tolerance in the mean"
    assert compared(rows(even), rows(slow_at_one_size), "--per-case")[0] == 1


def test_the_first_peer_that_both_have(compared):
    both = ("openmpi", "gloo")
    assert (
        "relative to openmpi"
        in compared(rows(even, peers=both), rows(even, peers=both), "--relative-to", "openmpi,gloo")[1]
    )
    assert "relative to gloo" in compared(rows(even, peers=both), rows(even), "--relative-to", "openmpi,gloo")[1]


def test_what_cannot_be_compared(compared):
    assert compared(rows(even), rows(even), "--relative-to", "mpich")[0] == 2, "nobody has it"
    assert compared(rows(even), ({**row, "world": 4} for row in rows(even)))[0] == 2, "nothing in common"
    code, told = compared(rows(even), ({**row, "wrong": 3} for row in rows(even)))
    assert code == 2 and "wrong elements" in told
