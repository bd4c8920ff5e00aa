"""Jobs on emulated hosts: the transport and the order are found out, and what goes wrong is told by name."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from hosts import hosts
from ringlet.bench.hosts import Hosts

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


def test_connections_are_few():
    """To neighbours of the ring that are on other hosts, or to partners across hosts: none that nobody names."""
    most = {"ring": 2, "butterfly": 4, "circulant": 4}
    with hosts(4, ranks_per_host=2) as made:
        told = results(start(made, "connections", ",".join(most)))
    for algorithm, named in most.items():
        assert all(one[algorithm]["right"] for one in told)
        assert max(one[algorithm]["connections"] for one in told) <= named


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
