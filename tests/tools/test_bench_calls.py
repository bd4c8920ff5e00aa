"""A sweep of several collectives: every call of torch.distributed beside gloo's, and what a library has no call for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import page

from ringlet.bench import results
from ringlet.bench.cases import Sweep
from ringlet.bench.ranks.case import CALLS
from ringlet.bench.run import run

SMALL = Sweep(begin_bytes=4, end_bytes=4096, factor=32, rounds=2, sample_ms=1.0, memory=("ordinary",))


def test_every_call_of_torch_beside_gloo(tmp_path: Path) -> None:
    memory = ("ordinary", "allocator")
    one_size = replace(SMALL, begin_bytes=4096, rounds=1)
    sweep = replace(one_size, collectives=CALLS, memory=memory, via=("torch",), peers=("gloo",))
    outcome = run(sweep)
    assert outcome.refused == {} and results.wrong_elements(outcome.rows) == 0
    found = results.compare(outcome.rows)
    told = [(one.call.collective, one.config.memory, list(one.ratios)) for one in found]
    assert sorted(told) == sorted(
        (collective, one, [0 if collective == "barrier" else 4096]) for collective in CALLS for one in memory
    )
    assert list(dict.fromkeys(one.call.collective for one in found)) == list(CALLS)
    written = page.markdown(outcome.rows, {})
    assert f"# {len(CALLS)} collectives on" in written and "all_to_all_list auto, allocator, via torch" in written
    means = [line for line in written.splitlines() if line.startswith("| of all collectives |")]
    assert len(means) == 1 and means[0].count("x") == 2, "one for each memory"
    pytest.importorskip("matplotlib")
    from ringlet.bench.plot import plot

    plot(outcome.rows, tmp_path / "plot.svg")
    assert "all_gather_list, 2 ranks" in (tmp_path / "plot.svg").read_text()


def test_what_has_no_such_call_is_told() -> None:
    rank_lists = replace(SMALL, collectives=("all_gather_list", "barrier"), via=("api",), peers=("gloo",), rounds=1)
    outcome = run(rank_lists)
    assert list(outcome.refused) == ["ringlet auto, ordinary, all_gather_list"]
    assert [row["library"] for row in outcome.rows if row["collective"] == "barrier"].count("ringlet") == 1
