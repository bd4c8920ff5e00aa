"""Emulated hosts are what they say: apart, shaped, counted, unplugged, and gone afterwards."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest
from benchmarks.clusters import Cluster, read_cluster
from benchmarks.hosts import INTERFACE

import ringlet
from hosts import hosts, require_hosts
from programs import processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTERS = sorted((ROOT / "benchmarks" / "clusters").glob("*.toml"))


# ---- descriptions


def test_numberings():
    block, cyclic = (Cluster(3, ranks_per_host=2, numbering=numbering) for numbering in ("block", "cyclic"))
    assert [block.host_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [block.local_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [cyclic.host_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [cyclic.local_rank(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_shipped_clusters_are_valid(path):
    cluster = read_cluster(path)
    assert path.stem.startswith(f"{cluster.hosts}x{cluster.ranks_per_host}")
    assert cluster.ranks_per_host == 1 or path.stem.endswith(cluster.numbering)


@pytest.mark.parametrize(
    "text, said",
    [
        ("ranks_per_host = 2", "hosts is missing"),
        ("hosts = 0", "hosts = 0 is not a whole number"),
        ("hosts = 1000", "more than 64"),
        ("hosts = 2\nnumbering = 'random'", "not one of block, cyclic"),
        ("hosts = 2\nuplink_mbit = 0", "not a rate"),
        ("hosts = 2\nlink_mbit = nan", "not a rate"),
        ("hosts = 2\nuplnk_mbit = 10", "uplnk_mbit is not one of"),
        ("hosts = ", "cluster"),
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path, text, said):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ringlet.Error, match=said):
        read_cluster(file)


# ---- what hosts are


def test_rates_are_the_kernels():
    with hosts(2, uplink_mbit=200, link_mbit=1000) as made:
        rules = made.run(1, ["tc", "qdisc"], capture_output=True, text=True).stdout
    assert f"dev {INTERFACE} root" in rules
    (uplink,) = [line for line in rules.splitlines() if f"dev {INTERFACE} " in line]
    (inside,) = [line for line in rules.splitlines() if "dev lo " in line]
    assert "rate 200Mbit" in uplink and "rate 1Gbit" in inside


# ---- afterwards


MAKER = """
import subprocess, sys
from benchmarks.clusters import Cluster
from benchmarks.hosts import Hosts
with Hosts(Cluster(2)) as made:
    # A grandchild, in a session of its own, that ignores every polite signal.
    program = ["setsid", "sh", "-c", "trap '' TERM HUP INT; sleep 1000 & echo; wait"]
    made.start(0, program, stdout=subprocess.PIPE).stdout.readline()
    keepers = [keeper.pid for keeper in made._keepers]
    made.remote_shell()
    print(*keepers, flush=True)
    sys.stdin.read()
"""


def members(networks: set[int]) -> list[int]:
    return processes(lambda one: (one / "ns/net").stat().st_ino in networks)


@pytest.mark.parametrize("ending", ["order", "SIGKILL"])
def test_nothing_is_left(ending, tmp_path):
    require_hosts()
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    keepers = [int(pid) for pid in maker.stdout.readline().split()]
    held = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in keepers]  # so that no other gets its number
    networks = {os.fstat(one).st_ino for one in held}
    assert len(networks) == 3 and len(members(networks)) >= 4
    assert len(list(tmp_path.rglob("*"))) == 3  # a folder with the hosts' names and the remote shell
    ends = [os.pidfd_open(pid) for pid in keepers]
    if ending == "SIGKILL":
        maker.send_signal(signal.SIGKILL)
    maker.communicate()
    for end in ends:
        assert select.select([end], [], [], 30)[0], "a keeper outlives its maker"
        os.close(end)
    assert members(networks) == []
    for one in held:
        os.close(one)
    assert list(tmp_path.iterdir()) == []
