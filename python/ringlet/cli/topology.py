"""`ringlet doctor --topology`: which ranks share a host, the transports between them, and the order of schedules."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence

import ringlet
from ringlet import _C, environment
from ringlet.agreement import all_gather_texts
from ringlet.group import Group
from ringlet.schedule.hosts import ranks_by_host

_LAUNCHES = ("torchrun --nproc-per-node 4 -m ringlet doctor --topology", "srun ringlet doctor --topology")


def topology_command() -> int:
    """Under a launcher, it is collective, and rank 0 prints. Elsewhere it prints this host's part and how to see the
    rest."""
    try:
        environment.find()
    except ringlet.InvalidUsage as reason:
        print("\n".join(own_host()))
        launches = "".join(f"\n  {launch}" for launch in _LAUNCHES)
        print(f"\nThis process is alone ({str(reason).partition(':')[0]}). To see the ranks of a job:{launches}")
        return 0
    group = ringlet.init()
    try:
        # Gathered over the group itself, so this also tries the group.
        told = all_gather_texts(group.handle, json.dumps(own_host()))
        if group.rank == 0:
            print(described(group, [json.loads(text) for text in told]), flush=True)
    finally:
        ringlet.finalize()
    return 0


def own_host() -> list[str]:
    """Lines about the host of this process: its name and identity, which is equal on ranks that share a host, and its
    addresses, the best first."""
    wanted = os.environ.get("RINGLET_INTERFACE") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    interfaces: dict[str, str] = {}
    for _, name in reversed(socket.if_nameindex()):
        with contextlib.suppress(ringlet.InvalidUsage):  # it has no address
            interfaces |= dict.fromkeys(_C.addresses(name), name)
    identity = os.environ.get("RINGLET_HOST_ID") or str(_C.host_identity())
    addresses = [f"address {interfaces.get(address, '?')} {address}" for address in _C.addresses(wanted)]
    return [f"{socket.gethostname()}, identity {identity[:200]}", *addresses]


def described(group: Group, told: Sequence[Sequence[str]]) -> str:
    """A text for people: hosts with their ranks, transports, and both orders. By rank 0, whose environment counts.
    told: `own_host` of each rank."""
    hosts = ranks_by_host(group.hosts)
    lines = [f"{group.world} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}, {_transports(group, hosts)}"]
    for number, ranks in enumerate(hosts):
        lines += ["", f"host {number}: ranks {_joined(ranks)}", *(f"  {line}" for line in told[ranks[0]])]
    seen: Sequence[int] = group.hosts
    if os.environ.get("RINGLET_TOPOLOGY") == "ignore":
        lines += ["", "RINGLET_TOPOLOGY=ignore: every rank counts as a host of its own"]
        seen = range(group.world)
    along, across = _C.orders(list(seen))
    lines += ["", f"ring goes round       {_joined(along)}", f"circulant goes round  {_joined(across)}"]
    return "\n".join(lines)


def _transports(group: Group, hosts: Sequence[Sequence[int]]) -> str:
    if group.transport != "shared_memory+tcp":
        return f"{group.transport} between all"
    if all(len(ranks) == 1 for ranks in hosts):
        return "tcp between all"
    return "shared_memory inside hosts, tcp between them"


def _joined(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))
