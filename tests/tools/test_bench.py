"""The benchmark measures what it says: cases, data that shows faults, turns, pairing, and ranks that die."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import __main__ as benchmarks
from benchmarks import machine_limit, page, uplinks
from benchmarks import sweep as sweeps
from benchmarks.clusters import read_cluster
from benchmarks.peers import mpi

from programs import processes
from ringlet.bench import report, results
from ringlet.bench.cases import Config, Sweep, bus_factor, format_bytes, sizes
from ringlet.bench.jobs import BenchError, Job, Jobs
from ringlet.bench.plot import plot
from ringlet.bench.ranks import data
from ringlet.bench.ranks.case import CALLS, COLLECTIVES, IN_PLACE, ITEM_BYTES, Case, buffer_elements
from ringlet.bench.run import Outcome, plan_samples, run, turns
from ringlet.cli import bench as bench_cli
from ringlet.cli.bench import build_sweep
from ringlet.cli.main import main, make_parser

ROOT = Path(__file__).parents[2]
SMALL = Sweep(begin_bytes=4, end_bytes=4096, factor=32, rounds=2, sample_ms=1.0, memory=("ordinary",))


def parse(*words: str) -> argparse.Namespace:
    return make_parser()[0].parse_args(["bench", *words])


def in_repository(monkeypatch: pytest.MonkeyPatch, *words: str) -> Sweep:
    """The sweep that `python -m benchmarks bench` would run."""
    found: list[Sweep] = []

    def refuse(sweep: Sweep) -> None:
        found.append(sweep)
        raise BenchError("only built")

    monkeypatch.setattr(bench_cli, "require_able", refuse)
    assert benchmarks.main(("bench", *words)) == 2
    return found[0]


def bench(*words: str) -> int:
    return main(("bench", *words))


# ---- cases


def test_sizes_are_whole_elements_and_blocks() -> None:
    assert sizes(Sweep(begin_bytes=1, end_bytes=100, factor=4), 2, "all_reduce") == [(4, 1), (16, 4), (64, 16)]
    for collective in ("all_gather", "all_gather_list"):
        assert sizes(Sweep(begin_bytes=4, end_bytes=64, factor=4), 3, collective) == [(12, 1), (60, 5)]
    assert sizes(Sweep(), 2, "barrier") == [(0, 0)]
    assert [format_bytes(size) for size in (4, 3000, 65536, 256 << 20)] == ["4 B", "3000 B", "64 KiB", "256 MiB"]


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("reduce_scatter", 4) == bus_factor("all_gather", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0


def test_options_override_those_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.args"
    file.write_text("# mine\n--world 4,8  # two worlds\n--peers gloo -e 1M\n\n--rounds 7\n")
    sweep = build_sweep(parse(f"@{file}", "--nproc", "2", "-c", "0"))
    assert (sweep.worlds, sweep.peers, sweep.end_bytes, sweep.rounds, sweep.check) == (
        (2,),
        ("gloo",),
        1 << 20,
        7,
        False,
    )
    file.write_text("--ronuds 7\n")
    with pytest.raises(SystemExit):
        bench(f"@{file}")
    with pytest.raises(SystemExit):
        bench(f"@{tmp_path}/missing.args")
    told = capsys.readouterr().err
    assert "--ronuds: no such option; did you mean --rounds?" in told and "No such file" in told


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "benchmarks" / "sweeps").iterdir()])
def test_shipped_sweeps_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = in_repository(monkeypatch, f"@benchmarks/sweeps/{name}.args")
    assert any(config.library == "ringlet" for config in sweep.configs())
    assert any(config.library != "ringlet" for config in sweep.configs())


BAD: list[dict[str, object]] = [
    {"peers": ("nccl",)},
    {"device": "cuda", "peers": ("mpich",)},
    {"device": "cuda", "peers": ("limit",)},
    {"hosts": read_cluster(ROOT / "benchmarks/clusters/2x1.toml"), "peers": ("limit",), "worlds": (2,)},
    {"device": "cuda", "memory": ("allocator",)},
]


@pytest.mark.parametrize("bad", BAD)
def test_a_sweep_that_cannot_run_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(BenchError):
        sweeps.Sweep(**bad)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_measuring_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = build_sweep(parse("--device", "cuda"))
    assert (sweep.peers, sweep.memory) == (("nccl",), ("ordinary",))
    assert bench("--device", "cuda") == 2
    assert "sees no cuda here" in capsys.readouterr().err


def test_through_torch_there_is_no_choice_of_algorithm() -> None:
    configs = replace(SMALL, algorithms=("ring", "butterfly"), via=("api", "torch"), peers=("gloo", "mpich")).configs()
    assert [str(config) for config in configs] == [
        "ringlet ring, ordinary", "ringlet butterfly, ordinary", "ringlet auto, ordinary, via torch", "gloo", "mpich",
    ]  # fmt: skip


# ---- data


def exchanged(case: Case, seed: int) -> list[np.ndarray | None]:
    """What each rank must receive, computed the plain way from what each rank sends."""
    inputs = []
    for rank in range(case.world):
        buffer = np.empty(buffer_elements(case, rank)[0], dtype=case.dtype)
        data.fill(buffer, data.input_table(case, rank, seed))
        inputs.append(buffer)
    blocks = [buffer.reshape(-1, case.count) for buffer in inputs]
    root_only = [None] * (case.world - 1)
    if case.collective == "send_recv":
        return [inputs[rank ^ 1] for rank in range(case.world)]
    if case.moves in ("all_reduce", "reduce", "reduce_scatter"):
        total = np.sum(inputs, axis=0).astype(case.dtype)
        if case.moves == "reduce_scatter":
            return list(total.reshape(case.world, -1))
        return [total] * case.world if case.collective == "all_reduce" else [total, *root_only]
    if case.collective == "broadcast":
        return [inputs[0]] * case.world
    if case.collective == "scatter":
        return list(blocks[0])
    if case.moves == "all_to_all":
        return [np.concatenate([sent[rank] for sent in blocks]) for rank in range(case.world)]
    everything = np.concatenate(inputs)
    return [everything] * case.world if case.moves == "all_gather" else [everything, *root_only]


def a_case(collective: str, world: int, count: int, dtype: str = "float32", op: str = "sum") -> Case:
    blocks = 1 if collective in (*IN_PLACE, "send_recv") else world
    return Case(collective, "ring", "ordinary", "api", world, count * blocks * ITEM_BYTES[dtype], count, dtype, op)


@pytest.mark.parametrize("collective", [call for call in CALLS if call != "barrier"])
@pytest.mark.parametrize(("world", "count"), [(1, 5), (2, 1), (3, 4099), (4, 10000)])
def test_expected_results(collective: str, world: int, count: int) -> None:
    if collective == "send_recv" and world % 2:
        pytest.skip("pairs of ranks")
    case = a_case(collective, world, count)
    for rank, result in enumerate(exchanged(case, seed=3)):
        segments = data.expected(case, rank, 3)
        if result is None:
            assert segments == []
            continue
        assert sum(elements for _, _, elements in segments) == len(result)
        assert data.count_wrong(result, segments) == 0
        broken = result.copy()
        broken[-1] += 1
        assert data.count_wrong(broken, segments) == 1


def test_faults_show() -> None:
    case = a_case("all_reduce", 4, 1 << 16)
    (result, *_), segments = exchanged(case, seed=1), data.expected(case, 0, 1)
    assert result is not None
    swapped = np.concatenate([result[1 << 15 :], result[: 1 << 15]])
    assert data.count_wrong(swapped, segments) > 30000, "blocks in the wrong places"
    assert data.count_wrong(result, data.expected(case, 0, 2)) > 30000, "the result of the call before"
    assert data.count_wrong(np.full_like(result, np.nan), segments) == 1 << 16
    assert data.count_wrong(result[:-7], segments) == 7, "a short result"


@pytest.mark.parametrize("op", ["avg", "product", "min", "max", "bxor"])
@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_reductions_fit_their_dtype(op: str, dtype: str) -> None:
    case = a_case("all_reduce", 5, 100, dtype, op)
    inputs = np.array([data.input_table(case, rank, 0) for rank in range(5)])
    plain = {"avg": np.mean, "product": np.prod, "min": np.min, "max": np.max, "bxor": np.bitwise_xor.reduce}[op]
    assert np.array_equal(data.reduced_table(case, 0), plain(inputs, axis=0))
    assert data.reduced_table(case, 0).max() <= 127


# ---- turns and pairs


def test_every_configuration_has_one_turn_per_round_and_size() -> None:
    sweep = replace(SMALL, peers=("gloo", "openmpi", "mpich"), rounds=4)
    configs = sweep.configs()
    taken = list(turns(sweep, 2, configs))
    assert set(Counter((config, case.bytes, round_) for config, case, round_ in taken).values()) == {1}
    # What is compared is adjacent: the turns of one (round, size) follow each other.
    groups = [(round_, case.bytes) for _, case, round_ in taken]
    changes = sum(before != after for before, after in itertools.pairwise(groups))
    assert changes == len(set(groups)) - 1
    firsts = {taken[index][0] for index in range(0, len(taken), len(configs))}
    assert len(firsts) > 1, "the order changes"


@pytest.mark.parametrize("call_us", [0.0, 0.3, 19.0, 21.0, 150.0, 2e5])
def test_measurements_are_of_bounded_length(call_us: float) -> None:
    samples, batch = plan_samples(Sweep(sample_ms=50), call_us)
    assert samples >= 5 and (batch == 1 or call_us < 20) and batch <= 100
    assert samples * batch * call_us <= max(50e3 * 1.1, 5 * call_us)
    assert plan_samples(Sweep(iterations=30), 1e6) == (30, 1)


def a_row(library: str, time: float, round_: int, size: int = 4, **other: object) -> dict[str, object]:
    row = {
        "library": library, "collective": "all_reduce", "algorithm": "auto", "transport": "t", "memory": "ordinary",
        "via": "api", "world": 2, "bytes": size, "count": size // 4, "dtype": "float32", "op": "sum",
        "time_us_min": time, "time_us_p50": time, "time_us_p99": time, 
        "algbw_gbps": 1.0, "busbw_gbps": 1.0, "wrong": 0, "round": round_,
    }  # fmt: skip
    return row | other


def test_ratios_are_paired_within_a_round_against_the_best_peer() -> None:
    rows = []
    for round_, drift in enumerate((1.0, 10.0, 1.0)):
        rows += [
            a_row("ringlet", 2 * drift, round_),
            a_row("mpich", 8 * drift, round_),
            a_row("openmpi", 6 * drift, round_),
        ]
        rows += [a_row("ringlet", 5 * drift, round_, size=16), a_row("mpich", 60 * drift, round_, size=16)]
    (found,) = results.compare(rows)
    assert found.rivals == "best MPI" and found.ratios == {4: 3.0, 16: 12.0}


def test_a_wrong_configuration_has_no_ratio_and_is_no_rival(tmp_path: Path) -> None:
    rows = [a_row("ringlet", 1.0, 0, wrong=3), a_row("ringlet", 1.0, 1), a_row("ringlet", 2.0, 0, memory="registered")]
    rows += [a_row("gloo", 6.0, 0), a_row("mpich", 1.0, 0, wrong=1), a_row("openmpi", 8.0, 0), a_row("limit", 1.0, 0)]
    found = [(one.config.memory, one.rivals, one.ratios) for one in results.compare(rows)]
    assert found == [("registered", "best MPI", {4: 4.0}), ("registered", "gloo", {4: 3.0})]
    assert {config.library for _, _, config in uplinks.relative_to("limit", rows)} == {"ringlet", "gloo", "openmpi"}
    (table,) = machine_limit.tables(rows)
    assert [row[0] for row in table.rows] == ["ringlet auto, registered", "gloo", "openmpi"]
    pytest.importorskip("matplotlib")
    wrong = [a_row("ringlet", 1.0, 0, wrong=3), a_row("gloo", 6.0, 0)]
    plot(wrong, tmp_path / "wrong.svg")
    assert "fastest peer" not in (tmp_path / "wrong.svg").read_text()


def test_rows_of_several_calls_are_not_mixed(tmp_path: Path) -> None:
    rows = []
    for dtype, op, theirs in (("float32", "sum", 6.0), ("int8", "sum", 9.0), ("int8", "max", 12.0)):
        call = {"dtype": dtype, "op": op}
        rows += [a_row("ringlet", 3.0, 0, **call), a_row("gloo", theirs, 0, **call), a_row("limit", 1.5, 0, **call)]
    calls = list(dict.fromkeys(map(results.call_of, rows)))
    assert [str(call) for call in calls] == ["all_reduce of float32", "all_reduce of int8", "all_reduce of int8, max"]
    assert {one.call: one.ratios for one in results.compare(rows)} == {
        call: {4: ratio} for call, ratio in zip(calls, (2.0, 3.0, 4.0), strict=True)
    }
    assert {call for call, _, _ in uplinks.relative_to("limit", rows)} == set(calls)
    tables = report.measurements(rows, {})
    titles = [table.title.partition(",")[0] for table in tables]
    assert titles == ["all_reduce of float32", "all_reduce of int8", "all_reduce of int8"]
    assert [row[-1] for row in machine_limit.tables(rows)[0].rows] == ["2.00", "4.00"]  # ringlet's, gloo's
    assert "limit" not in {one.rivals for one in results.compare(rows)}
    (table,) = report.summary(rows, {})
    assert table.columns == ["size", *map(str, calls)] and table.rows[0] == ["4 B", "2.00x", "3.00x", "4.00x"]
    pytest.importorskip("matplotlib")
    plot(rows, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"all_reduce, 2 ranks, {what}: time" in drawn for what in ("float32", "int8", "int8, max"))


def test_the_spread_over_rounds_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [a_row("ringlet", 2.0 + round_, round_, size=size) for round_ in range(5) for size in (4, 1024)]
    rows += [a_row("gloo", 9.0, round_, size=size) for round_ in range(5) for size in (4, 1024)]
    for name in ("first.svg", "second.svg"):
        plot(rows, tmp_path / name)
    drawn = (tmp_path / "first.svg").read_text()
    assert drawn == (tmp_path / "second.svg").read_text(), "the same rows give the same bytes"
    for text in ("whisker: range", "GB/s", "µs", "1 KiB", "4 B"):
        assert f"<!-- {text}" in drawn or text in drawn, text
    plot([row for row in rows if row["library"] == "gloo"], tmp_path / "alone.svg")
    assert "fastest peer" not in (tmp_path / "alone.svg").read_text()


# ---- the limit

FAST_CORES = machine_limit.Cores(bytes=1, line_us=0.5, foreign_gbps=10.0, copy_gbps=40.0, add_gbps=50.0)


@pytest.mark.parametrize(
    "collective, world, size, least",
    [
        ("all_reduce", 2, 4, 0.25 + 4e-4),  # one way of a line
        ("all_reduce", 2, 1_000_000, 0.25 + 100.0),  # a megabyte of the other's
        ("all_reduce", 4, 1_000_000, 0.25 + 150.0),
        ("reduce_scatter", 4, 1_000_000, 0.25 + 75.0),
        ("all_gather_list", 4, 1_000_000, 0.25 + 75.0),
        ("broadcast", 4, 1_000_000, 100.0),  # ranks do not wait for each other
        ("barrier", 4, 0, 0.25),
    ],
)
def test_the_least_time_of_a_call(collective: str, world: int, size: int, least: float) -> None:
    case = Case(collective, "default", "ordinary", "threads", world, size, size // 4, "float32", "sum")
    assert machine_limit.least_us(case, FAST_CORES) == pytest.approx(least)
    if size == 1_000_000 and world == 2:  # where memory is slower, it is the limit: a megabyte in, one out
        assert machine_limit.least_us(case, replace(FAST_CORES, copy_gbps=4.0)) == pytest.approx(500.0)


@pytest.mark.skipif(machine_limit.processors() is None, reason="there is one processor")
def test_the_limit_end_to_end(tmp_path: Path) -> None:
    file, usable = tmp_path / "all.jsonl", os.sched_getaffinity(0)
    flags = ["--world", f"2,{len(usable) + 1}", "--collective", "all_reduce,barrier", "--peers", "limit"]
    flags += ["--memory", "ordinary", "-b", "4", "-e", "64K", "-f", "16384", "--rounds", "2", "--ms", "1"]
    assert benchmarks.main(("bench", *flags, "--json", str(file))) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {tuple(row) for row in rows} == {results.KEYS}
    found = [row for row in rows if row["library"] == "limit"]
    assert len(found) == 6 and {row["world"] for row in found} == {2}  # more ranks than processors have none
    assert all(row["time_us_p50"] > 0 and row["wrong"] is None for row in found)
    meta = json.loads(file.with_suffix(".meta.json").read_text())
    assert meta["limit"]["memory_bytes"] == 65536 and all(value > 0 for value in meta["limit"].values())
    collectives = ("all_reduce", "barrier")
    assert sorted(meta["refused"]) == [f"limit, {one}, {len(usable) + 1} ranks" for one in collectives]
    written = page.markdown(rows, meta)
    assert "a line there and back" in written and "p50/limit" in written
    assert os.sched_getaffinity(0) == usable


@pytest.mark.skipif(machine_limit.processors() is None, reason="there is one processor")
def test_a_limit_that_cannot_be_measured_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(machine_limit, "processors", lambda: (0, 1000))
    with pytest.raises(BenchError, match="cannot be measured: machine_limit: cannot run on processor 1000: Invalid"):
        machine_limit.measure(4096)


# ---- end to end


def test_gloo_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "all.jsonl"
    flags = ["--algorithms", "none", "--peers", "gloo", "-b", "4", "-e", "4K", "-f", "32", "--rounds", "2", "--ms", "1"]
    assert bench(*flags, "--json", str(file)) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [tuple(row) for row in rows] == [results.KEYS] * 6
    assert {(row["bytes"], row["count"], row["round"]) for row in rows} == {
        (size, size // 4, round_) for size in (4, 128, 4096) for round_ in (0, 1)
    }
    assert all(row["wrong"] == 0 and 0 < row["time_us_min"] <= row["time_us_p50"] <= row["time_us_p99"] for row in rows)
    meta = json.loads(file.with_suffix(".meta.json").read_text())
    assert meta["machine"]["cores"] >= 1 and meta["commit"] and "gloo" in meta["versions"]
    assert "busbw" in capsys.readouterr().out
    written = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["page.py", str(file), "--page", str(written)])
    page.main()
    assert "busbw" in capsys.readouterr().out
    text = written.read_text()
    assert "| hardware |" in text and "| commit |" in text and "| command |" in text


def test_every_collective_end_to_end() -> None:
    """On ranks that are started once: ringlet's registered and ordinary memory, and gloo."""
    with Jobs(["ringlet/api", "gloo/torch"], 3, SMALL) as jobs:
        for seed, collective in enumerate(COLLECTIVES):
            for name, memory in (
                ("ringlet/api", "registered"),
                ("ringlet/api", "ordinary"),
                ("gloo/torch", "ordinary"),
            ):
                case = replace(
                    a_case(collective, 3, 10000), algorithm="auto", memory=memory, via=name.partition("/")[2]
                )
                command = {"do": "prepare", "case": asdict(case), "seed": seed, "warmup": 1, "check": True}
                prepared = jobs[name].ask(command, 60.0)
                assert [answer["wrong"] for answer in prepared] == [0, 0, 0], (collective, name, memory)
                timed = jobs[name].ask({"do": "measure", "samples": 4, "batch": 3}, 60.0)
                assert all(0 < answer["min"] <= answer["p50"] <= answer["p99"] for answer in timed)


def test_ringlet_through_torch_beside_gloo(tmp_path: Path) -> None:
    outcome = run(replace(SMALL, memory=("registered", "ordinary"), via=("torch",), peers=("gloo",)))
    assert {row["transport"] for row in outcome.rows} == {"shared_memory", "tcp"}
    assert results.wrong_elements(outcome.rows) == 0
    (first, second) = results.compare(outcome.rows)
    assert {first.config.memory, second.config.memory} == {"registered", "ordinary"} and first.rivals == "gloo"
    pytest.importorskip("matplotlib")
    plot(outcome.rows, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "ringlet auto, registered, via torch" in drawn and "gloo" in drawn


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
    plot(outcome.rows, tmp_path / "plot.svg")
    assert "all_gather_list, 2 ranks" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("peer", mpi.installed())
@pytest.mark.parametrize("world", [2, 4])
def test_mpi_end_to_end(peer: str, world: int) -> None:
    small = {**asdict(SMALL), "worlds": (world,), "algorithms": (), "peers": (peer,), "rounds": 1}
    outcome = run(sweeps.Sweep(**small))
    assert f"{peer}, {world} ranks" in outcome.settings
    assert [row["library"] for row in outcome.rows] == [peer] * 3
    assert results.wrong_elements(outcome.rows) == 0


def test_what_a_library_cannot_do_is_told() -> None:
    outcome = run(replace(SMALL, algorithms=(), peers=("gloo",), op="avg"))
    assert outcome.rows == [] and outcome.refused == {"gloo": "gloo has no average"}


def test_what_has_no_such_call_is_told() -> None:
    rank_lists = replace(SMALL, collectives=("all_gather_list", "barrier"), via=("api",), peers=("gloo",), rounds=1)
    outcome = run(rank_lists)
    assert list(outcome.refused) == ["ringlet auto, ordinary, all_gather_list"]
    assert [row["library"] for row in outcome.rows if row["collective"] == "barrier"].count("ringlet") == 1


def test_what_one_world_cannot_do_another_may() -> None:
    outcome = run(replace(SMALL, worlds=(3, 2), collectives=("send_recv",), end_bytes=4, rounds=1))
    assert [row["world"] for row in outcome.rows] == [2]
    assert list(outcome.refused) == ["ringlet auto, ordinary, 3 ranks"]
    assert "must be even" in outcome.refused.popitem()[1]


def test_a_run_that_breaks_off_leaves_no_circumstances_of_another(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text("{}\n")
    results.write_meta(file, {"commit": "old"})
    with pytest.raises(KeyboardInterrupt), results.recorder(file) as record:
        record(a_row("gloo", 1.0, 0, uplink_bytes=None))
        raise KeyboardInterrupt
    rows, meta = page.read(file)
    assert len(rows) == 1 and meta == {}


def test_two_files_of_rows_do_not_share_their_circumstances(tmp_path: Path) -> None:
    found = {results.meta_file(tmp_path / name).name for name in ("a.jsonl", "a.json", "a.txt", "b.jsonl")}
    assert found == {"a.meta.json", "a.json.meta.json", "a.txt.meta.json", "b.meta.json"}


@pytest.mark.parametrize("order", [(0, 7, None), (None, 7, 0), (7, None, 0)])
def test_wrong_elements_of_any_round_fail_the_command(
    order: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [a_row("ringlet", 1.0, round_, wrong=wrong) for round_, wrong in enumerate(order)]
    monkeypatch.setattr(bench_cli, "run", lambda sweep, seen: Outcome(rows))
    assert bench("--peers", "none") == 1
    told = capsys.readouterr()
    assert "7 wrong elements" in told.err and "n/a" not in told.out


# ---- what goes wrong


def test_a_named_peer_that_is_missing_stops_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpi, "_ENVIRONMENTS", tmp_path)
    file = tmp_path / "rows.jsonl"
    assert benchmarks.main(("bench", "--peers", "gloo,mpich", "--json", str(file))) == 2
    assert "no environment for mpich: run `make peers`" in capsys.readouterr().err and not file.exists()


def test_a_peer_not_named_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi, "_ENVIRONMENTS", tmp_path)
    assert in_repository(monkeypatch).peers == ("gloo",) == build_sweep(parse()).peers


def processes_of(jobs: Jobs) -> list[int]:
    """Whose command line names the jobs' private folder."""
    return processes(lambda one: str(jobs.folder).encode() in (one / "cmdline").read_bytes())


@pytest.mark.parametrize("name", ["gloo/torch", "ringlet/api"])
def test_a_rank_that_dies_ends_everything(name: str) -> None:
    jobs = Jobs([name], 2, SMALL)
    with pytest.raises(BenchError, match=rf"{name}, 2 ranks: rank 1 (died|is gone)"), jobs as started:
        assert len(processes_of(jobs)) == 2
        started[name]._processes[1].kill()
        started[name]._processes[1].wait()
        started[name].ask({"do": "measure", "samples": 1, "batch": 1}, 60.0)
    assert processes_of(jobs) == []
    assert not jobs.folder.exists()


def test_a_rank_that_fails_says_why() -> None:
    case = Config("ringlet", "nosuch", "ordinary", "api")
    with pytest.raises(BenchError, match=r"ringlet/api, 2 ranks: rank \d failed during prepare:.*nosuch") as raised:
        run(replace(SMALL, algorithms=(case.algorithm,)))
    assert "Traceback" not in str(raised.value), "the user's mistake, not the program's"


def test_a_job_that_does_not_start_says_what_it_printed(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import sys; sys.exit('no libmpi here')"]
    job = Job("mpich/mpi4py", 1, [program], {}, tmp_path)
    job._processes[0].wait()
    with pytest.raises(BenchError, match=r"mpich/mpi4py, 1 ranks: ended with status 1[\s\S]*no libmpi here"):
        job.check_alive()
    job.kill()
