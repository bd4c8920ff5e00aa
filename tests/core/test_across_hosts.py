"""Jobs on emulated hosts: the transport and the order are found out, and what goes wrong is told by name."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
from benchmarks.hosts import Hosts

from hosts import hosts

PROGRAM = pathlib.Path(__file__).parents[1] / "support/across_hosts.py"


def start(made: Hosts, *arguments: str) -> list[subprocess.Popen[str]]:
    """All ranks of a cluster, each on its host."""
    processes = []
    for rank in range(made.cluster.world):
        command = [sys.executable, str(PROGRAM), *arguments]
        environment = made.environment(rank) | {"OMP_NUM_THREADS": "1"}
        processes.append(
            made.start(made.cluster.host_of(rank), command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    return processes


def start_by_file(
    made: Hosts, path: pathlib.Path, job: str, *arguments: str, **variables: str
) -> list[subprocess.Popen[str]]:
    """The same without a master address."""
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    world = made.cluster.world
    return [
        made.start(
            made.cluster.host_of(rank),
            [sys.executable, str(PROGRAM), job, str(rank), str(world), str(path), *arguments],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def ip(made: Hosts, host: int, *commands: str) -> None:
    for command in commands:
        made.run(host, ["ip", *command.split()], check=True)


def results(processes: list[subprocess.Popen[str]], timeout: float = 100) -> list[dict[str, Any]]:
    """The last line of every rank that was not killed."""
    told = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            if process.returncode != -signal.SIGKILL:
                assert process.returncode == 0, output
                told.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return told


@pytest.mark.parametrize(("count", "per_host", "numbering"), [(2, 1, "block"), (2, 2, "cyclic"), (3, 2, "block")])
def test_transport_and_topology_are_found_out(count, per_host, numbering):
    with hosts(count, ranks_per_host=per_host, numbering=numbering) as made:
        expected = [made.cluster.host_of(rank) for rank in range(made.cluster.world)]
        for rank, told in enumerate(results(start(made, "sums"))):
            transport = "shared_memory+tcp"
            assert told == {"rank": rank, "transport": transport, "hosts": expected, "wrong": []}


@pytest.mark.parametrize("end", ["killed", "link down"])
def test_a_host_that_is_lost_is_named_by_all(end):
    """The others' rings do not all lead to it directly."""
    with hosts(4) as made:
        processes = start(made, "until_it_fails", "4" if end == "link down" else "60")
        for process in processes:
            assert process.stdout is not None and json.loads(process.stdout.readline())["ready"]
        lost = 2
        if end == "killed":
            processes[lost].kill()
        else:
            made.link_down(lost)
        survivors = [one for one in results(processes) if one["rank"] != lost]
    assert len(survivors) == 3
    for one in survivors:
        assert one["kind"] in (("PeerLost",) if end == "killed" else ("PeerLost", "Timeout"))
        assert f"rank {lost}" in one["message"]


def link_local(made: Hosts, family: int) -> None:
    """Only what hosts give themselves on a direct cable, and loopback."""
    for host in range(2):
        ip(made, host, "-4 address flush dev eth0", "-6 address flush dev eth0")
        own = f"169.254.7.{host + 1}/16" if family == 4 else f"fe80::{host + 1}/64"
        ip(made, host, f"-{family} address add {own} dev eth0 scope link" + (" nodad" if family == 6 else ""))


@pytest.mark.parametrize("interface", ["", "eth0"])
@pytest.mark.parametrize("family", [4, 6])
def test_hosts_with_link_local_addresses_only(tmp_path, family, interface):
    with hosts(2) as made:
        link_local(made, family)
        given = {"RINGLET_INTERFACE": interface} if interface else {}
        for told in results(start_by_file(made, tmp_path / "store", "sum_and_messages", **given)):
            assert told["right"]


DEAD = 6


def add_dead(made: Hosts, host: int) -> None:
    """Interfaces that are up, with a network in which nobody answers."""
    for i in range(DEAD):
        ip(made, host, f"link add dead{i} type veth peer name end{i}", f"link set dead{i} up", f"link set end{i} up")
        ip(made, host, f"address add 172.30.{i}.{host + 1}/24 dev dead{i}")


def test_dead_interfaces_hide_no_good_one(tmp_path):
    with hosts(2) as made:
        for host in range(2):
            add_dead(made, host)
        named = ", ".join([*(f"dead{i}" for i in range(DEAD)), "eth0 "])
        for told in results(start_by_file(made, tmp_path / "store", "sum_and_messages", RINGLET_INTERFACE=named)):
            assert told["right"]


@pytest.mark.parametrize("master", [False, True])
def test_many_addresses_hide_no_good_one(tmp_path, master):
    """40 of one interface come before the only one that leads to the other host."""
    with hosts(2) as made:
        for host in range(2):
            ip(made, host, *(f"address add 10.90.0.{i + 1}/32 dev lo" for i in range(40)))
        processes = start(made, "sums") if master else start_by_file(made, tmp_path / "store", "sum_and_messages")
        for told in results(processes):
            assert told.get("right") or told["wrong"] == []


def listening(made: Hosts, host: int) -> set[int]:
    """The TCP ports on which anybody listens there."""
    code = "print(open('/proc/net/tcp').read() + open('/proc/net/tcp6').read())"
    lines = made.run(host, [sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {int(one[1].rpartition(":")[2], 16) for one in fields if len(one) > 3 and one[3] == "0A"}


def put_up_firewall(made: Hosts, host: int, how: str) -> None:
    """Nobody can connect to this host. `how`: as ip-rule says it ("blackhole" drops, "unreachable" refuses)."""
    ports = listening(made, host)
    assert ports
    for family in ("-4", "-6"):
        ip(made, host, f"{family} rule add pref 100 lookup local", f"{family} rule del pref 0")
        ip(made, host, *(f"{family} rule add pref 50 iif eth0 ipproto tcp dport {port} {how}" for port in ports))


@pytest.mark.parametrize("open_rank", [0, 1])
@pytest.mark.parametrize("how", ["blackhole", "unreachable"])
@pytest.mark.parametrize("what", ["all_reduce", "named", "any", "late", "both"])
def test_one_side_that_can_connect_is_enough(tmp_path, what, how, open_rank):
    """Only `open_rank` can connect to the other."""
    with hosts(2) as made:
        processes = start_by_file(made, tmp_path / "store", "one_way", what, str(open_rank))
        for process in processes:
            assert process.stdout is not None and json.loads(process.stdout.readline())["ready"]
        put_up_firewall(made, open_rank, how)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for told in results(processes):
            assert told["right"]
