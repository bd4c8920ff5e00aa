"""`ringlet doctor --topology`: what it tells of a job's ranks, and of a process that is alone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from programs import ended, printed
from ranks import LIMITED, free_ports
from ringlet import _C
from ringlet.cli.topology import own_host
from ringlet.schedule import schedule

VARIABLES = ("RANK", "WORLD_SIZE", "RINGLET_HOST_ID", "RINGLET_TRANSPORT", "RINGLET_TOPOLOGY", "RINGLET_INTERFACE")
CLEAN = {name: value for name, value in os.environ.items() if name not in VARIABLES} | LIMITED
COMMAND = (sys.executable, "-m", "ringlet", "doctor", "--topology")


def told(*hosts: str, **more: str) -> str:
    """What rank 0 of a job prints whose ranks are on these hosts; the others say nothing."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(len(hosts))}
    ranks = []
    for rank, host in enumerate(hosts):
        environment = CLEAN | job | {"RANK": str(rank), "RINGLET_HOST_ID": host} | more
        ranks.append(
            subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(hosts), said
    assert [output for output, _ in said[1:]] == [""] * (len(hosts) - 1)
    return said[0][0]


def test_hosts_orders_and_carriers():
    lines = told("a", "b", "b", "a").splitlines()
    assert lines[0] == "4 ranks on 2 hosts, shared_memory inside hosts, tcp between them"
    assert "host 0: ranks 0 3" in lines and "host 1: ranks 1 2" in lines
    assert any(line.endswith("identity a") for line in lines) and any(line.endswith("identity b") for line in lines)
    assert "ring goes round       0 3 1 2" in lines and "circulant goes round  0 1 3 2" in lines
    assert any("address lo 127.0.0.1" in line for line in lines)


def test_ranks_apart_and_topology_ignored():
    lines = told("a", "b").splitlines()
    assert lines[0] == "2 ranks on 2 hosts, tcp between all"
    lines = told("a", "b", "a", RINGLET_TOPOLOGY="ignore").splitlines()
    assert "ring goes round       0 1 2" in lines
    assert "RINGLET_TOPOLOGY=ignore: every rank counts as a host of its own" in lines


def test_one_host_and_a_transport_that_is_given():
    assert told("a", "a").startswith("2 ranks on 1 host, shared_memory between all\n")
    assert told("a", "a", RINGLET_TRANSPORT="tcp").startswith("2 ranks on 1 host, tcp between all\n")


def test_alone_it_tells_of_this_host_and_how_to_ask():
    told = printed(*COMMAND, env=CLEAN)
    assert f"identity {_C.host_identity()}" in told and "address lo 127.0.0.1" in told
    assert "torchrun --nproc-per-node 4 -m ringlet doctor --topology" in told
    done = ended(*COMMAND, env=CLEAN | {"RINGLET_INTERFACE": "none0"})
    assert done.returncode == 2 and 'names "none0"' in done.stderr
    done = ended(*COMMAND, env=CLEAN | {"RINGLET_INTERFACE": " , "})
    assert done.returncode == 2 and 'is " , ", which names no interface' in done.stderr


def congestion_control(wish: str) -> subprocess.CompletedProcess[str]:
    program = "from ringlet import _C; print(_C.congestion_control())"
    return ended(sys.executable, "-c", program, env=CLEAN | {"RINGLET_TCP_CONGESTION": wish})


def test_congestion_control_is_the_machines_or_the_one_that_is_named():
    machines = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert congestion_control("system").stdout.strip() == machines
    assert congestion_control("reno").stdout.strip() == "reno"
    default = congestion_control("").stdout.strip()
    assert default == machines if machines != "bbr" else default in ("cubic", "reno")
    done = congestion_control("none such")
    assert done.returncode == 1 and 'RINGLET_TCP_CONGESTION names "none such"' in done.stderr


def test_an_identity_without_end_fits(monkeypatch):
    monkeypatch.setenv("RINGLET_HOST_ID", "x" * 10000)
    assert len(own_host()[0].partition("identity ")[2]) == 200


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (0, 1, 2, 0, 0, 1), (5, 5, 5), (2, 1, 0)])
def test_the_ring_goes_round_as_told(hosts):
    along, across = _C.orders(list(hosts))
    ring = schedule("ring", "all_reduce", hosts=hosts)
    neighbour = {rank: next(s.peer for s in ring.ranks[rank][0].steps if s.verb == "send") for rank in along}
    assert [neighbour[rank] for rank in along] == [*along[1:], along[0]]
    assert sorted(across) == sorted(along) == list(range(len(hosts)))
