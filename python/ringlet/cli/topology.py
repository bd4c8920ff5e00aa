"""`ringlet doctor --topology`: which ranks share a host, the transports between them, and the order of schedules."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import ringlet
from ringlet import _C, environment
from ringlet.agreement import all_gather_texts
from ringlet.group import Group
from ringlet.schedule.hosts import ranks_by_host

_IDENTITY_LETTERS = 200
_LAUNCHES = ("torchrun --nproc-per-node 4 -m ringlet doctor --topology", "srun ringlet doctor --topology")


@dataclass(frozen=True)
class HostAddress:
    """One process's host. identity: equal on ranks that share one. addresses: "eth0 10.0.0.1", best first."""

    name: str
    identity: str
    addresses: tuple[str, ...]


def topology_command() -> int:
    """Under a launcher, it is collective, and rank 0 prints. Elsewhere it prints this host's part and how to see the
    rest."""
    try:
        environment.find()
    except ringlet.InvalidUsage as reason:
        print("\n".join(_host_lines(own_host_address())))
        launches = "".join(f"\n  {launch}" for launch in _LAUNCHES)
        print(f"\nThis process is alone ({str(reason).partition(':')[0]}). To see the ranks of a job:{launches}")
        return 0
    group = ringlet.init()
    try:
        everyone = gathered(own_host_address(), group)
        if group.rank == 0:
            print(described(group, everyone), flush=True)
    finally:
        ringlet.finalize()
    return 0


def own_host_address() -> HostAddress:
    """The host and addresses of this process."""
    wanted = os.environ.get("RINGLET_INTERFACE") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    interfaces: dict[str, str] = {}
    for _, name in reversed(socket.if_nameindex()):
        with contextlib.suppress(ringlet.InvalidUsage):  # it has no address
            interfaces |= dict.fromkeys(_C.addresses(name), name)
    addresses = (f"{interfaces.get(address, '?')} {address}" for address in _C.addresses(wanted))
    identity = os.environ.get("RINGLET_HOST_ID") or str(_C.host_identity())
    return HostAddress(socket.gethostname(), identity[:_IDENTITY_LETTERS], tuple(addresses))


def gathered(own: HostAddress, group: Group) -> list[HostAddress]:
    """The addresses by rank, gathered over the group itself. So this also tries the group."""
    told = (json.loads(text) for text in all_gather_texts(group.handle, json.dumps(asdict(own))))
    return [HostAddress(one["name"], one["identity"], tuple(one["addresses"])) for one in told]


def described(group: Group, everyone: Sequence[HostAddress]) -> str:
    """A text for people: hosts with their ranks, transports, and both orders. By rank 0, whose environment counts."""
    hosts = ranks_by_host(group.hosts)
    lines = [f"{group.world} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}, {carriers(group, hosts)}"]
    for number, ranks in enumerate(hosts):
        lines += ["", f"host {number}: ranks {_joined(ranks)}"]
        lines += [f"  {line}" for line in _host_lines(everyone[ranks[0]])]
    seen: Sequence[int] = group.hosts
    if os.environ.get("RINGLET_TOPOLOGY") == "ignore":
        lines += ["", "RINGLET_TOPOLOGY=ignore: every rank counts as a host of its own"]
        seen = range(group.world)
    along, across = _C.orders(list(seen))
    lines += ["", f"ring goes round       {_joined(along)}", f"circulant goes round  {_joined(across)}"]
    return "\n".join(lines)


def carriers(group: Group, hosts: Sequence[Sequence[int]]) -> str:
    """The transports between ranks, by transport of the group and hosts."""
    if group.transport != "shared_memory+tcp":
        return f"{group.transport} between all"
    if all(len(ranks) == 1 for ranks in hosts):
        return "tcp between all"
    return "shared_memory inside hosts, tcp between them"


def _host_lines(where: HostAddress) -> list[str]:
    named = f"{where.name}, identity {where.identity}"
    return [named, *(f"address {address}" for address in where.addresses)]


def _joined(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))
