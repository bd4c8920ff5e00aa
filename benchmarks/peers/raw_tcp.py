"""A rank of the yardstick: rank 0 streams a case's bytes to one other rank over plain TCP, and waits for one byte back.

Its time for S bytes is what the link, the kernel's TCP and Python's socket module take to carry them once. All other
ranks do nothing. Sockets have the kernel's own buffer sizes.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringlet.bench.ranks.case import Case
from ringlet.bench.ranks.loop import serve

_TIMEOUT_S = 120


class Stream:
    """One connection between rank 0 and rank `other`."""

    compares = False
    out_of_place = False
    finish: Callable[[], object] | None = None
    transport = "tcp"
    version = "one TCP connection"

    def __init__(self, rank: int, world: int, store: dist.Store, other: int, address: str) -> None:
        self.rank, self._world, self._socket = rank, world, None
        store.set_timeout(timedelta(seconds=_TIMEOUT_S))
        if world > other == rank:
            with socket.create_server((address, 0)) as server:
                server.settimeout(_TIMEOUT_S)
                store.set("port", str(server.getsockname()[1]))
                self._socket = server.accept()[0]
        elif rank == 0 and world > other:
            self._socket = socket.create_connection((address, int(store.get("port"))), _TIMEOUT_S)
        if self._socket:
            self._socket.settimeout(_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def refusal(self, case: Case) -> str | None:
        return "a stream needs two ranks" if self._world < 2 else None

    def allocate(self, elements: int, case: Case) -> None:
        """A stream carries the case's bytes whatever the collective's buffers are: `bind` makes its own."""

    def write(self, buffer: Any, table: Any) -> None:
        raise NotImplementedError("there are no buffers")

    def read(self, buffer: Any) -> Any:
        raise NotImplementedError("there are no buffers")

    def bind(self, case: Case, source: Any, output: Any) -> Callable[[], object]:
        if self._socket is None:
            return lambda: None
        view = memoryview(bytearray(case.bytes))
        return (lambda: self._send(view)) if self.rank == 0 else (lambda: self._receive(view))

    def barrier(self) -> None:
        if self._socket is not None:
            one = memoryview(bytearray(1))
            self._send(one) if self.rank == 0 else self._receive(one)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, view: memoryview) -> None:
        assert self._socket is not None
        self._socket.sendall(view)
        if not self._socket.recv(1):
            raise ConnectionError("the stream's other end is gone")

    def _receive(self, view: memoryview) -> None:
        assert self._socket is not None
        got = 0
        while got < len(view):
            received = self._socket.recv_into(view[got:])
            if not received:
                raise ConnectionError("the stream's other end is gone")
            got += received
        self._socket.sendall(b"1")


def ends(hosts: Any) -> list[str]:
    """The rank that rank 0 streams to, the first on another host, and its address. hosts: a `Hosts`, or None."""
    if hosts is None:
        return ["1", "127.0.0.1"]
    cluster = hosts.cluster
    away = [rank for rank in range(cluster.world) if cluster.host_of(rank) != cluster.host_of(0)]
    return [str(away[0]), hosts.addresses[cluster.host_of(away[0])]] if away else ["1", "127.0.0.1"]


def main(arguments: list[str]) -> None:
    """job, rank, world, the controller's socket, the store's file, the other rank and its address."""
    job, rank, world, path, store, other, address = arguments
    place, size = int(rank), int(world)
    serve(job, place, path, lambda: Stream(place, size, dist.FileStore(store, size), int(other), address))


if __name__ == "__main__":
    main(sys.argv[1:])
