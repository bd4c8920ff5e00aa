"""The benchmark on emulated hosts: ranks are where the cluster has them, and what crosses the uplinks is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import hosts, page, uplinks
from benchmarks.__main__ import main
from benchmarks.clusters import Cluster
from benchmarks.peers import mpi
from benchmarks.sweep import Sweep
from benchmarks.uplinks import busiest_uplink, over_stream, stream_times, uplink_factor

from hosts import require_hosts
from ringlet.bench import results
from ringlet.bench.jobs import BenchError
from ringlet.bench.run import run
from ringlet.cli import bench as cli

ROOT = Path(__file__).parents[2]
PAIR = Cluster(2, uplink_mbit=1000)
SMALL = Sweep(
    worlds=(2,), hosts=PAIR, algorithms=(), memory=("ordinary",), peers=("stream", "gloo"),
    begin_bytes=4, end_bytes=1 << 18, factor=1 << 16, rounds=2, sample_ms=1.0,
)  # fmt: skip
ON_HOSTS = tuple(peer for peer in mpi.installed() if peer != "intelmpi")


def bench(*words: str) -> int:
    return main(("bench", *words))


# ---- arithmetic


def test_the_least_that_an_uplink_carries():
    assert uplink_factor("all_reduce", Cluster(4, ranks_per_host=8)) == 1.5
    assert uplink_factor("reduce_scatter", Cluster(4)) == uplink_factor("all_gather", Cluster(4)) == 0.75
    assert uplink_factor("broadcast", Cluster(4, ranks_per_host=2)) == 1.0
    assert uplink_factor("all_to_all", Cluster(4, ranks_per_host=2)) == 1.5


def test_the_busiest_uplink_is_one_way_of_one_host():
    before = [hosts.Traffic(100, 200), hosts.Traffic(0, 0)]
    after = [hosts.Traffic(150, 290), hosts.Traffic(70, 80)]
    assert busiest_uplink(before, after) == 90
    assert busiest_uplink([], []) is None


def on_hosts(library: str, collective: str, time: float, crossed: int | None, **other: object) -> dict[str, object]:
    row = {
        "library": library, "collective": collective, "algorithm": "ring", "transport": "tcp", "memory": "ordinary",
        "via": "api", "world": 4, "bytes": 1000, "count": 250, "dtype": "float32", "op": "sum", "time_us_min": time,
        "time_us_p50": time, "time_us_p99": time, "algbw_gbps": 1.0, "busbw_gbps": 1.0, "wrong": 0,
        "uplink_bytes": crossed, "round": 0,
    }  # fmt: skip
    return row | other


def test_times_are_told_in_those_of_the_stream():
    times = (("stream", 2.0, 0), ("ringlet", 5.0, 0), ("stream", 20.0, 1), ("ringlet", 60.0, 1))
    rows = [on_hosts(library, "all_reduce", time, None, round=round_) for library, time, round_ in times]
    assert list(stream_times(rows).values()) == [2.75]


def test_each_collective_has_its_own_bound_and_its_own_stream():
    rows = []
    for collective, time, crossed in (("all_reduce", 150.0, 1500), ("all_gather", 150.0, 750)):
        rows += [on_hosts("ringlet", collective, time, crossed), on_hosts("stream", collective, crossed / 10, 1000)]
    found = {call.collective: ratio for (call, _, _), ratio in over_stream(rows).items()}
    assert found == {"all_reduce": 1.0, "all_gather": 2.0}
    with pytest.raises(ValueError, match="several calls"):
        stream_times(rows)
    reduce, gather = uplinks.tables(rows, {"cluster": {"hosts": 4}})
    assert reduce.title.startswith("all_reduce of float32: ") and "is 1.500 buffers" in reduce.title
    assert gather.title.startswith("all_gather of float32: ") and "is 0.750 buffers" in gather.title
    assert [table.rows[0][-3:] for table in (reduce, gather)] == [
        ["1.500", "1.000", "150.0%"],
        ["0.750", "2.000", "37.5%"],
    ]


def test_rows_without_bytes_on_uplinks_are_not_in_their_table():
    rows = [on_hosts("ringlet", "barrier", 5.0, 60, bytes=0), on_hosts("ringlet", "all_reduce", 5.0, None)]
    rows += [on_hosts("ringlet", "all_gather", 5.0, 900, world=8), on_hosts("ringlet", "all_gather", 5.0, 900, wrong=1)]
    (table,) = uplinks.tables(rows, {"cluster": {"hosts": 4}})  # the other world is of other hosts
    assert [line[3:] for line in table.rows] == [["900", "0.900", "", ""]]


# ---- end to end


def test_gloo_against_the_stream(tmp_path: Path):
    require_hosts()
    file, described = tmp_path / "all.jsonl", tmp_path / "pair.toml"
    described.write_text("hosts = 2\nuplink_mbit = 1000\n")
    flags = ["--algorithms", "none", "--peers", "stream,gloo", "-b", "4", "-e", "256K", "-f", "65536"]
    assert bench("--cluster", str(described), *flags, "--rounds", "2", "--ms", "1", "--json", str(file)) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [tuple(row) for row in rows] == [results.KEYS] * 8
    for row in rows:  # a collective of two hosts sends the buffer once each way; so does a stream one way
        assert row["bytes"] <= row["uplink_bytes"] and (row["bytes"] < 1 << 18 or row["uplink_bytes"] < 1 << 19)
        assert row["wrong"] == (None if row["library"] == "stream" else 0)
    meta = json.loads(file.with_suffix(".meta.json").read_text())
    assert meta["cluster"]["hosts"] == 2 and meta["cluster"]["name"] == "pair"
    (table,) = uplinks.tables(rows, meta)
    assert [line[0] for line in table.rows] == ["gloo", "gloo"] and all(line[-1].endswith("%") for line in table.rows)
    written = page.markdown(rows, meta)
    assert "| emulated cluster | 2 hosts x 1 rank, uplinks 1000 Mbit/s" in written and table.title in written


@pytest.mark.parametrize("peer", ON_HOSTS)
@pytest.mark.parametrize("numbering", ["block", "cyclic"])
def test_mpi_ranks_are_where_the_cluster_has_them(peer: str, numbering: str):
    """`Jobs` refuses a rank on another host, and `run` a library that goes around the network."""
    require_hosts()
    cluster = Cluster(3, ranks_per_host=2, numbering=numbering)
    outcome = run(replace(SMALL, worlds=(6,), hosts=cluster, peers=(peer,), rounds=1))
    assert [row["library"] for row in outcome.rows] == [peer] * 2
    assert results.wrong_elements(outcome.rows) == 0


def test_a_library_that_goes_around_the_network_is_refused(monkeypatch: pytest.MonkeyPatch):
    require_hosts()
    monkeypatch.setattr(hosts.Hosts, "traffic", lambda self: [hosts.Traffic(7, 7)] * 2)
    with pytest.raises(BenchError, match=r"gloo: 0 bytes a call crossed .* does not use the network between the hosts"):
        run(replace(SMALL, peers=("gloo",)))


def test_a_rank_on_another_host_is_refused(monkeypatch: pytest.MonkeyPatch):
    require_hosts()
    place = hosts.Hosts.command
    monkeypatch.setattr(hosts.Hosts, "command", lambda self, host, arguments: place(self, 0, arguments))
    with pytest.raises(BenchError, match="gloo/torch: rank 1 runs on host0, not on host1"):
        run(replace(SMALL, peers=("gloo",)))


def test_a_sweep_may_name_its_hosts(monkeypatch: pytest.MonkeyPatch):
    found: list[Sweep] = []

    def refuse(sweep: Sweep):
        found.append(sweep)
        raise BenchError("only built")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "require_able", refuse)
    for more in ((), ("--cluster", "benchmarks/clusters/2x4-cyclic.toml")):
        assert bench("@benchmarks/sweeps/contention.args", *more) == 2
    named, other = found
    assert named.hosts and (named.hosts.name, named.worlds, named.medium) == ("4x2-block", (8,), "hosts")
    assert other.hosts and (other.hosts.name, other.worlds) == ("2x4-cyclic", (8,))
    assert other.hosts.numbering == "cyclic" and other.peers == ("stream",)
    assert (SMALL.medium, Sweep().medium) == ("apart", "hosts")


# ---- what cannot run


def test_what_does_not_fit_a_cluster_is_refused():
    with pytest.raises(BenchError, match="has 2 ranks"):
        replace(SMALL, worlds=(4,))
    with pytest.raises(BenchError, match="intelmpi cannot run between hosts"):
        replace(SMALL, peers=("intelmpi",))


def test_the_command_says_why_hosts_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(hosts, "why_not", lambda: "emulated hosts need root")
    cluster = ("--cluster", str(ROOT / "benchmarks/clusters/4x1.toml"), "--peers", "gloo")
    assert bench(*cluster) == 2
    assert bench(*cluster, "--nproc", "8") == 2
    assert bench("--cluster", "no-such-cluster.toml", "--peers", "gloo") == 2
    said = capsys.readouterr().err
    assert "need root" in said and "has 4 ranks" in said and "no-such-cluster.toml: No such file" in said
