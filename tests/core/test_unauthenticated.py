"""A thousand connections that are none of the job's, while it runs: random bytes, cut handshakes, huge and slow ones.

What they may say of a handshake itself, replays and all, is tried on the listener in tests/cpp/listener_test.cc.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import socket
import struct
import threading

import torch

import ringlet

UNAUTHENTICATED = 1000
GROWTH_MIB = 32
HELLO = struct.pack("<4sI", b"RING", 1)  # csrc/transport/connection_handshake.h; 56 bytes would follow
LISTENS = "0A"


def listeners() -> list[int]:
    """The TCP ports at which this process listens."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_link(fd)}
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:] if pathlib.Path(table).exists() else ():
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def resident_bytes() -> int:
    """Now, not at its highest: earlier tests of this process do not hide what grows."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def knock(port: int, kind: int, kept: list[socket.socket]) -> None:
    noise = random.Random(kind)
    said = (
        noise.randbytes(noise.randrange(1, 4096)),
        HELLO + noise.randbytes(noise.randrange(56)),
        HELLO + noise.randbytes(56) + noise.randbytes(16),
        b"\xff" * (1 << 20),
        b"GET / HTTP/1.1\r\n\r\n",
        b"R",
    )[kind % 6]
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    with contextlib.suppress(OSError):  # it may be thrown out meanwhile
        client.sendall(said)
    if kind % 6 in (1, 5):
        kept.append(client)  # and says no more
    else:
        client.close()


def work_among_unauthenticated_connections(rank: int, world: int) -> tuple[int, int, int]:
    tensor = torch.empty(10_000)
    ringlet.barrier()
    (port,) = listeners()
    before = resident_bytes()
    kept: list[socket.socket] = []
    knocked = []

    def knock_all() -> None:
        for kind in range(UNAUTHENTICATED):
            knock(port, kind, kept)
            knocked.append(kind)

    clients = threading.Thread(target=knock_all)
    clients.start()
    calls = 0
    over = torch.zeros(1)
    while over != world:  # all ranks make the same calls: until the unauthenticated connections of each have been
        tensor.fill_(rank + 1)
        ringlet.all_reduce(tensor)
        assert bool((tensor == world * (world + 1) / 2).all())
        over.fill_(0.0 if clients.is_alive() else 1.0)
        ringlet.all_reduce(over)
        if calls % 50 == 0:
            ringlet.new_group(range(world)).close()  # connections of its own have to be made and proven meanwhile
        calls += 1
    clients.join()
    for client in kept:
        client.close()
    return len(knocked), calls, resident_bytes() - before


def test_unauthenticated_connections_do_not_disturb_a_running_job(pool):
    pool.end()  # nobody but ringlet listens in a new process
    for knocked, calls, grown in pool.values(work_among_unauthenticated_connections, 2, join="tcp"):
        assert knocked == UNAUTHENTICATED and calls > 10
        assert grown < GROWTH_MIB << 20
