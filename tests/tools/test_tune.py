"""`ringlet tune`: rules out of measurements, and a real run whose table is then used."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from ringlet import _C
from ringlet.bench.rules import Rule, Timing, derive, size_text, table_text
from ringlet.cli import bench, outputs
from ringlet.cli.main import main
from ringlet.cli.tune import alternatives
from ringlet.errors import InvalidUsage

SIZES = (1024, 4096, 16384, 65536)


def usual(collective: str, nbytes: int, world: int, medium: str) -> str:
    return "two_shot"


def timed(speeds: dict[str, tuple[float, ...]], medium: str = "staged") -> list[Timing]:
    """Three rounds on a machine that drifts by halves: only ratios within a round tell. speeds: times two_shot's."""
    timings = []
    for index, size in enumerate(SIZES):
        for algorithm, gains in ({"two_shot": (1.0,) * len(SIZES)} | speeds).items():
            times = {round_: drift * size / gains[index] for round_, drift in enumerate((1.0, 1.5, 2.0))}
            timings.append(Timing("all_reduce", medium, 4, size, algorithm, times))
    return timings


def ranges(rules: list[Rule]) -> list[tuple[int | None, int, str]]:
    return [(rule.above, rule.up_to, rule.algorithm) for rule in rules]


def test_what_does_not_pay_writes_no_rule():
    assert derive(timed({"ring": (1.04, 0.5, 1.0, 1.049)}), usual) == []
    assert ranges(derive(timed({"ring": (1.04, 0.5, 1.0, 1.049)}), usual, 0.03)) == [
        (1023, 1024, "ring"), (16384, 65536, "ring"),
    ]  # fmt: skip


def test_neighbours_share_a_rule_and_none_reaches_beyond_what_was_measured():
    rules = derive(timed({"ring": (1.2, 1.3, 1.0, 2.0), "star": (1.1, 1.0, 1.4, 1.0)}), usual)
    assert ranges(rules) == [(1023, 4096, "ring"), (4096, 16384, "star"), (16384, 65536, "ring")]
    assert rules[0].gains == pytest.approx((1.2, 1.3))


def test_a_rule_begins_at_the_smallest_measured_size():
    timings = timed({"ring": (2.0,) * 4})
    for smallest, above in ((1020, 1019), (4, 3), (1, None)):
        (rule,) = derive(
            [Timing("all_reduce", "staged", 4, smallest, one.algorithm, one.times) for one in timings[:2]], usual
        )
        assert (rule.above, rule.up_to) == (above, smallest)
        text = table_text([rule])
        assert _C.chosen("all_reduce", smallest, 4, "staged", text) == "ring"
        assert smallest == 1 or _C.chosen("all_reduce", smallest - 1, 4, "staged", text) != "ring"


def test_a_rule_for_a_barrier_has_no_size():
    timings = [
        Timing("barrier", "staged", 4, 0, name, {0: time}) for name, time in (("two_shot", 2.0), ("dissemination", 1.0))
    ]
    (rule,) = derive(timings, usual)
    assert table_text([rule]).split("#")[0].split() == ["barrier", "world", "4", "staged", "dissemination"]
    assert _C.chosen("barrier", 0, 4, "staged", table_text([rule])) == "dissemination"


def test_an_algorithm_stays_while_no_other_pays_more_by_the_margin():
    rules = derive(timed({"ring": (1.2, 1.20, 1.20, 1.2), "star": (1.1, 1.24, 1.27, 1.22)}), usual)
    assert ranges(rules) == [(1023, 4096, "ring"), (4096, 65536, "star")]


def test_one_lucky_round_is_not_enough():
    timings = timed({"ring": (1.0, 1.0, 1.0, 1.0)})
    for timing in timings:
        if timing.algorithm == "ring":
            timing.times[0] /= 10
    assert derive(timings, usual) == []


def test_media_are_kept_apart():
    rules = derive(timed({"ring": (2,) * 4}) + timed({"star": (2,) * 4}, "registered"), usual)
    assert [(rule.medium, rule.algorithm, rule.up_to) for rule in rules] == [
        ("staged", "ring", 65536), ("registered", "star", 65536),
    ]  # fmt: skip


def test_the_text_says_what_the_rules_do():
    rules = derive(timed({"ring": (1.2, 1.0, 1.3, 2.0)}) + timed({"star": (1.0, 2.0, 2.5, 1.0)}, "apart"), usual)
    text = table_text(rules)
    for medium in ("staged", "apart"):
        for size in (1, 1023, 1024, 1025, 4096, 4097, 16384, 65536, 65537):
            fits = [r for r in rules if r.medium == medium and (r.above or 0) < size <= r.up_to]
            wanted = fits[0].algorithm if fits else _C.chosen("all_reduce", size, 4, medium)
            assert _C.chosen("all_reduce", size, 4, medium, text) == wanted
        assert _C.chosen("all_reduce", 1024, 5, medium, text) == _C.chosen("all_reduce", 1024, 5, medium)
    assert "1.20x" in text and "1.30x to 2.00x" in text and table_text([]) == ""
    assert [size_text(size) for size in (3, 1024, 1536, 3 << 20, 1 << 30)] == ["3B", "1KiB", "1536B", "3MiB", "1GiB"]


def test_all_that_have_a_choice_are_measured():
    assert {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"} <= alternatives().keys()
    assert "barrier" not in alternatives()


def test_a_real_run_writes_a_table_that_is_used(tmp_path, monkeypatch, capsys):
    table = tmp_path / "config" / "table"
    monkeypatch.setenv("RINGLET_TABLE", str(table))
    words = ("tune", "--collectives", "reduce", "-b", "1K", "-e", "4K", "--rounds", "1", "--ms", "1")
    # With such a margin every other algorithm pays, so that there are rules whatever this machine does.
    assert main((*words, "--margin", "-99.9")) == 0
    text = table.read_text()
    printed = capsys.readouterr().out
    assert printed == text and text.startswith("# ")
    rules = [line.partition("#")[0].split() for line in text.splitlines() if not line.startswith(("#", "tuned"))]
    assert {words[0] for words in rules} == {"reduce"}  # one rule for both sizes, or one for each
    assert "4KiB" in rules[-1]
    assert _C.chosen("reduce", 4096, 2, "staged") == "star"
    assert _C.chosen("reduce", 4096, 2, "staged", text) == rules[-1][-1] != "star"
    assert main(("tune", "--show")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# from {table}\n{text}") and shown.endswith(_C.built_in_rules())
    _C.chosen("reduce", 1, 2, "staged", shown)  # what is shown is a table

    assert main((*words, "--margin", "1e9")) == 0
    assert "the built-in choice is right" in capsys.readouterr().err
    assert table.with_name("table.before").read_text() == text


def gpu_rows(sweep, speeds):
    """Of three rounds: NCCL takes 1000 us, and `auto` as much less as peers' memory is faster at that size."""
    return [
        {"collective": collective, "transport": "cuda", "memory": "ordinary", "world": sweep.worlds[0], "bytes": size,
         "algorithm": algorithm, "round": turn, "wrong": 0, "time_us_p50": 1000 / (speed if algorithm == "auto" else 1)}
        for collective in sweep.collectives for turn in range(3) for size, speed in speeds.items()
        for algorithm in sweep.algorithms
    ]  # fmt: skip


@pytest.fixture
def measured_on_gpus(monkeypatch):
    """What `ringlet tune --device cuda` measures where there is no GPU; the sweeps, and what the ranks are told."""
    seen = []
    speeds = {1 << 10: 3.0, 1 << 20: 2.0, 2 << 20: 1.5, 4 << 20: 0.5, 16 << 20: 0.2}
    meta = {
        "command": "ringlet tune", "date": "now", "commit": "0", "machine": {"processor": "none", "cores": 2},
        "versions": {"ringlet": "ringlet 1 through peer memory up to 9 bytes, NCCL 2.28.9 beyond"},
    }  # fmt: skip

    def measure(sweep):
        given = {"table": pathlib.Path(sweep.variables["RINGLET_TABLE"]).read_text()}
        seen.append((sweep, given | {"peers up to": sweep.variables["RINGLET_PEER_MEMORY_BYTES"]}))
        return gpu_rows(sweep, speeds), meta

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "require_device", lambda sweep: None)
    return seen, meta


def test_the_limit_between_peers_and_nccl_is_written_as_rules(tmp_path, measured_on_gpus):
    seen, _ = measured_on_gpus
    table = tmp_path / "table"
    words = ("tune", "--device", "cuda", "--world", "2,4", "--collective", "all_reduce,broadcast", "-o", str(table))
    assert main(words) == 0
    assert [(sweep.worlds, sweep.device, sweep.algorithms) for sweep, _ in seen] == [
        ((world,), "cuda", ("auto", "nccl")) for world in (2, 4)
    ]
    assert all(told == {"table": "", "peers up to": str(1 << 60)} for _, told in seen)
    text = table.read_text()
    rules = [line.partition("#")[0].split() for line in text.splitlines() if not line.startswith("#")]
    assert rules == [
        f"{collective} above 1MiB up to 2MiB world {world} gpus peers".split()
        for world in (2, 4) for collective in ("all_reduce", "broadcast")
    ]  # fmt: skip
    for collective, world, size, way in (
        ("all_reduce", 2, 1 << 20, "peers"), ("all_reduce", 2, 2 << 20, "peers"), ("all_reduce", 2, 3 << 20, "nccl"),
        ("all_reduce", 3, 2 << 20, "nccl"), ("reduce", 2, 2 << 20, "nccl"), ("all_to_all", 2, 1 << 30, "peers"),
    ):  # fmt: skip
        assert _C.chosen(collective, size, world, "gpus", text) == way
    assert _C.chosen("all_reduce", 2 << 20, 2, "peers", text) == _C.chosen("all_reduce", 2 << 20, 2, "peers")


def test_without_both_ways_there_is_no_limit_to_measure(tmp_path, capsys, measured_on_gpus):
    measured_on_gpus[1]["versions"]["ringlet"] = "ringlet 1 through NCCL 2.28.9; no peer memory; rank 0: far away"
    assert main(("tune", "--device", "cuda", "-o", str(tmp_path / "table"))) == 2
    assert "needs peers' memory and NCCL, and 2 ranks had ringlet 1 through NCCL" in capsys.readouterr().err
    assert not (tmp_path / "table").exists()


def test_lines_of_sizes_stay_and_count_meanwhile(tmp_path, measured_on_gpus):
    table = tmp_path / "table"
    table.write_text("all_reduce world 3 ring\ntuned streaming_bytes 4MiB processor Other-1\n")
    assert main(("tune", "--device", "cuda", "-o", str(table))) == 0
    (_, given), *_ = measured_on_gpus[0]
    assert given["table"] == "tuned streaming_bytes 4MiB processor Other-1\n"
    text = table.read_text()
    assert _C.tuned(text, "Other-1")["streaming_bytes"] == 4 << 20 and "world 3" not in text


@pytest.mark.parametrize(
    "words, said",
    [
        (("--device", "cuda", "--transport", "tcp"), "leave out --transport and files"),
        (("--device", "cuda", "--collective", "all_to_all"), "NCCL has no all_to_all of its own"),
        (("--device", "cuda", "--world", "1"), "has no algorithm to choose"),
        (("-b", "4K", "-e", "1K"), "sizes"),
        ((), "give -o FILE"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, capsys, monkeypatch):
    monkeypatch.setenv("RINGLET_TABLE", "")
    assert main(("tune", *words)) == 2
    assert said in capsys.readouterr().err


# ---- the file of the table


def test_there_is_a_table_at_every_moment(tmp_path, monkeypatch):
    table = tmp_path / "table"
    table.write_text("old\n")
    rename, seen = pathlib.Path.replace, []

    def watched(self, target):
        seen.append(table.read_text())
        result = rename(self, target)
        seen.append(table.read_text())
        return result

    monkeypatch.setattr(pathlib.Path, "replace", watched)
    outputs.write_table(table, "new\n")
    assert seen == ["old\n"] * 3 + ["new\n"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"table": "new\n", "table.before": "old\n"}


@pytest.mark.parametrize(("owner", "name"), [(pathlib.Path, "write_text"), (shutil, "copy2")])
def test_a_full_disk_leaves_the_table(owner, name, tmp_path, monkeypatch):
    table = tmp_path / "table"
    table.write_text("old\n")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(InvalidUsage, match="No space left"):
            outputs.write_table(table, "new\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("table", "old\n")]


def test_a_table_behind_a_link_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    real.write_text("old\n")
    link.symlink_to(real)
    outputs.write_table(link, "new\n")
    assert link.is_symlink() and real.read_text() == "new\n"
    assert (tmp_path / "folder" / "real.before").read_text() == "old\n"
    real.unlink()
    outputs.check({"-o": link})
    assert link.is_symlink() and not real.exists()
    outputs.write_table(link, "newest\n")
    assert link.is_symlink() and real.read_text() == "newest\n"


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert outputs.table_text(pipe) == ""  # does not wait for a writer
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        outputs.write_table(pipe, "table\n")
        assert os.read(reader, 100) == b"table\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("text", [b"# caf\xe9\n", b"all_reduce caf\xe9\n"])
def test_a_table_that_is_no_text_is_refused(text, tmp_path, monkeypatch, capsys):
    table = tmp_path / "table"
    table.write_bytes(text)
    monkeypatch.setenv("RINGLET_TABLE", str(table))
    for words in (("--show",), ("-o", str(table))):
        assert main(("tune", *words)) == 2
        assert f"{table} is not UTF-8 text" in capsys.readouterr().err
    assert table.read_bytes() == text


def test_search_keeps_the_table_that_it_replaces(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    table = tmp_path / "racks"
    table.write_text("# mine\n")
    words = ("--hosts", "2x2", "--machine", "slow-uplinks", "-b", "64K", "-e", "64K", "-k", "1", "-o", str(table))
    assert main(("search", *words)) == 0
    assert table.read_text().startswith("# ringlet search") and (tmp_path / "racks.before").read_text() == "# mine\n"


# ---- results that are wrong


def wrong_rows(sweep):
    """What each algorithm took; the second is the fastest, and wrong."""
    rows = [
        {"collective": collective, "transport": "tcp", "memory": "ordinary", "world": sweep.worlds[0],
         "bytes": sweep.begin_bytes, "algorithm": algorithm, "round": 0, "time_us_p50": 100.0 - 90 * (place == 1),
         "wrong": 7 * (place == 1)}
        for collective in sweep.collectives for place, algorithm in enumerate(sweep.algorithms)
    ]  # fmt: skip
    return rows, {"versions": {"ringlet": "ringlet 1"}}


def test_wrong_results_make_no_rule(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    monkeypatch.setattr(bench, "measure", wrong_rows)
    monkeypatch.setattr(bench, "require_able", lambda sweep: None)
    table = tmp_path / "table"
    names = alternatives()["all_reduce"]
    words = ("--collective", "all_reduce", "-b", "64K", "-e", "64K", "-o", str(table))
    assert main(("tune", *words, "--transport", "tcp")) == 2
    assert f"all_reduce: 7 wrong elements by {names[1]} at 64 KiB" in capsys.readouterr().err
    assert not table.exists()
