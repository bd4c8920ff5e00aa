"""Emulated hosts: network namespaces that veth pairs join to a bridge, shaped by tbf; needs root.

    host0 (lo, eth0 10.77.0.1) --veth-- port0 \\
    host1 (lo, eth0 10.77.0.2) --veth-- port1 -- bridge, in a namespace of its own      tbf on eth0: to the switch
    ...                                                                                 tbf on portN: to the host

A host has its own network, host name, /etc/hosts and /dev/shm; processes, files and processors are the machine's.
No interface, route or name is made in the machine's own network, and the namespaces have no names: they live as long
as the processes in them, and those end when the process that made them does, also by kill -9 (`host_keeper.py`).

Linux has no delay emulation without netem, so hosts are as near as the machine's scheduler lets them be. tbf sends in
bursts of at least one 64 KiB packet, as the kernel hands them to a network card that cuts them into frames itself: a
message smaller than that meets no limit. With smaller bursts tbf cuts them, and four hosts' frames at 200 Mbit/s take
both cores of a small machine: then the processors are the limit, not the links. Congestion control is the machine's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clusters import Cluster

from ringlet.bench.jobs import BenchError

INTERFACE = "eth0"
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_KEEPER = Path(__file__).with_name("host_keeper.py")
# A burst lasts 1 ms at the rate and holds a packet of 64 KiB in 46 frames; a queue holds what a switch's port does.
_BURST_S, _LEAST_BURST, _QUEUE_BYTES = 1e-3, 72_000, 1 << 20


@functools.cache
def why_not() -> str | None:
    """The reason why this machine cannot make hosts (no root, tools or kernel support), or None. Tries it once."""
    if sys.platform != "linux":
        return "emulated hosts need Linux"
    if os.geteuid() != 0:
        return "emulated hosts need root (network namespaces and traffic shaping)"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        with Hosts(Cluster(2, uplink_mbit=100)):
            return None
    except BenchError as error:
        return f"emulated hosts are not possible here: {error}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of a host's uplink since it was made, headers included, as its interface counts them."""

    sent: int
    received: int


class Hosts:
    """The hosts of a cluster, as a context: `with Hosts(Cluster(4, uplink_mbit=200)) as hosts`.

    names, addresses, addresses6: of the hosts, in order (addresses6 is empty if the kernel has no IPv6). Raises
    BenchError that says what was refused. Whatever happens inside, no process in the hosts outlives the context.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.names = tuple(f"host{index}" for index in range(cluster.hosts))
        self.addresses = tuple(f"10.77.0.{index + 1}" for index in range(cluster.hosts))
        six = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()
        self.addresses6 = tuple(f"fd77::{index + 1:x}" for index in range(cluster.hosts)) if six else ()
        self._keepers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="ringlet-hosts-"))
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on a host; exec'd there, so that its pid is the program's."""
        # --wd: entering the mount namespace would leave the working directory for "/".
        return [*_enter(self._keepers[host].pid), f"--wd={os.getcwd()}", "--", *arguments]

    def start(self, host: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen on a host."""
        return subprocess.Popen(self.command(host, arguments), **options)

    def run(self, host: int, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run on a host."""
        return subprocess.run(self.command(host, arguments), **options)

    def environment(self, rank: int, port: int = 29500) -> dict[str, str]:
        """The variables that torchrun would give a rank here; the master address is rank 0's host."""
        cluster, host = self.cluster, self.cluster.host_of(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(cluster.world),
            "LOCAL_RANK": str(cluster.local_rank(rank)),
            "LOCAL_WORLD_SIZE": str(cluster.ranks_per_host),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(cluster.hosts),
            "MASTER_ADDR": self.addresses[cluster.host_of(0)],
            "MASTER_PORT": str(port),
        }

    @property
    def interface(self) -> str:
        """Of each host, to the switch."""
        return INTERFACE

    def traffic(self) -> list[Traffic]:
        """Every host's uplink counters, in order."""
        return [_traffic(keeper.pid) for keeper in self._keepers[: self.cluster.hosts]]

    def link_down(self, host: int) -> None:
        """Pulls a host's cable at the switch: packets vanish both ways, and no end is notified."""
        _run([*_enter(self._switch), "ip", "link", "set", f"port{host}", "down"])

    def remote_shell(self) -> Path:
        """A program that runs a command on a host by name, with rsh's arguments: for an MPI's launcher."""
        path = self._folder / "remote-shell"
        lines = [
            f'    {name}) exec {" ".join(_enter(keeper.pid))} --wd={self._folder} -- sh -c "$*" ;;'
            for name, keeper in zip(self.names, self._keepers, strict=False)
        ]
        options = 'while [ "${1#-}" != "$1" ]; do shift; done'
        text = ["#!/bin/sh", options, "name=$1; shift", 'case "$name" in', *lines, "esac"]
        path.write_text("\n".join([*text, 'echo "no host $name" >&2', "exit 255", ""]))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    @property
    def _switch(self) -> int:
        return self._keepers[-1].pid

    def _build(self) -> None:
        names = self._folder / "hosts"
        entries = [("127.0.0.1", "localhost"), *zip(self.addresses, self.names, strict=True)]
        if self.addresses6:
            entries += [("::1", "localhost"), *zip(self.addresses6, self.names, strict=True)]
        names.write_text("".join(f"{address} {name}\n" for address, name in entries))
        for name in (*self.names, "switch"):
            unshared = ["unshare", "--net", "--mount", "--uts", sys.executable, "-I", "-S", str(_KEEPER), name]
            self._keepers.append(
                subprocess.Popen(
                    [*unshared, str(names)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    start_new_session=True,
                )
            )  # fmt: skip
        for keeper in self._keepers:
            assert keeper.stdout is not None and keeper.stderr is not None
            if keeper.stdout.readline() != "ready\n":
                raise BenchError(f"a namespace was refused: {keeper.stderr.read().strip().splitlines()[-1:]}")
        _run([*_enter(self._switch), "ip", "-batch", "-"], "\n".join(self._switch_setup()))
        if self.cluster.uplink_mbit is not None:
            rules = [_shape(f"port{index}", self.cluster.uplink_mbit) for index in range(self.cluster.hosts)]
            _run([*_enter(self._switch), "tc", "-batch", "-"], "\n".join(rules))
        for index in range(self.cluster.hosts):
            self._set_up_host(index)

    def _switch_setup(self) -> Iterator[str]:
        yield "link add name bridge0 type bridge"
        yield "link set bridge0 up"
        for index, keeper in enumerate(self._keepers[: self.cluster.hosts]):
            yield f"link add port{index} type veth peer name {INTERFACE} netns {keeper.pid}"
            yield f"link set port{index} master bridge0 up"

    def _set_up_host(self, index: int) -> None:
        enter, cluster = _enter(self._keepers[index].pid), self.cluster
        lines = ["link set lo up", f"address add {self.addresses[index]}/24 dev {INTERFACE}"]
        if self.addresses6:
            lines.append(f"address add {self.addresses6[index]}/64 dev {INTERFACE} nodad")
        lines.append(f"link set {INTERFACE} up")
        _run([*enter, "ip", "-batch", "-"], "\n".join(lines))
        rates = ((INTERFACE, cluster.uplink_mbit), ("lo", cluster.link_mbit))
        rules = [_shape(interface, rate) for interface, rate in rates if rate is not None]
        if rules:
            _run([*enter, "tc", "-batch", "-"], "\n".join(rules))

    def _end(self) -> None:
        for keeper in self._keepers:
            for stream in (keeper.stdin, keeper.stdout, keeper.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        for keeper in self._keepers:
            keeper.wait()
        self._keepers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--uts", "--mount"]


def _shape(interface: str, mbit: float) -> str:
    """The tc command that limits the outgoing rate of an interface."""
    burst = max(_LEAST_BURST, int(mbit * 1e6 / 8 * _BURST_S))
    return f"qdisc add dev {interface} root tbf rate {round(mbit * 1e6)}bit burst {burst} limit {_QUEUE_BYTES}"


def _traffic(pid: int) -> Traffic:
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return Traffic(sent=int(fields[8]), received=int(fields[0]))
    raise BenchError(f"process {pid} has no {INTERFACE}")


def _run(command: list[str], told: str = "") -> None:
    done = subprocess.run(command, input=told + "\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
