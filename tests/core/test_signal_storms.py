"""Signals, as fast as they come, with a handler that does not raise: they end no wait, and no rank counts as gone.

Python tells nobody which call a signal ended early, so each kind of wait is tried while signals come all the time, and
one rank after the other comes late.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import joined

EVERY_S, LATE_S, TIMEOUT_S = 5e-5, 0.03, 60.0
SECONDS = float(os.environ.get("RINGLET_TEST_STORM_SECONDS", "0.5"))
SIGNALS = 100  # that each rank hears at the least
TGKILL = 234  # of x86-64


@contextlib.contextmanager
def storm() -> Iterator[list[int]]:
    """Gives how many signals the handler has heard. Python calls it once for many signals of the kernel."""
    heard = [0]

    def handler(*_: Any) -> None:
        heard[0] += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        yield heard
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops those that still wait for a thread that blocks them
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def storm_on_all_threads() -> Iterator[list[int]]:
    """The timer's signals mostly reach the main thread; these reach every thread of the process."""
    over, libc = threading.Event(), ctypes.CDLL(None, use_errno=True)

    def strike() -> None:
        while not over.is_set():
            for thread in os.listdir("/proc/self/task"):
                libc.syscall(TGKILL, os.getpid(), int(thread), signal.SIGALRM.value)  # one that has ended hears nothing

    with storm() as heard:
        striker = threading.Thread(target=strike)
        striker.start()
        try:
            yield heard
        finally:
            over.set()
            striker.join()


def every_wait(rank: int, world: int, late: int) -> None:
    """Every kind of wait of a group. The others wait for the late rank."""

    def all_reduce(count: int = 1000, asynchronous: bool = False) -> None:
        tensor = torch.full((count,), float(rank))
        work = ringlet.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert tensor.eq(world * (world - 1) / 2).all()

    def messages(count: int) -> None:
        out, into = torch.full((count,), float(rank)), torch.empty(count)
        work = ringlet.send(out, (rank + 1) % world, async_op=True)
        ringlet.recv(into, (rank - 1) % world)
        work.wait()
        assert into.eq((rank - 1) % world).all()

    waits: list[Callable[[], None]] = [
        ringlet.barrier,
        all_reduce,
        lambda: all_reduce(1 << 20),
        lambda: all_reduce(asynchronous=True),
        lambda: messages(100),
        lambda: messages(1 << 20),
    ]
    for wait in waits:
        if rank == late:
            time.sleep(LATE_S)  # its other work
        wait()


def rounds(rank: int, world: int, transport: str, store: dist.Store | None, heard: list[int]) -> tuple[int, int]:
    """Makes groups, waits in them and closes them, until rank 0 has had its time and each rank its signals, which on a
    busy machine takes longer. Signals heard, groups made."""
    groups, until = 0, time.monotonic() + SECONDS
    while True:
        with joined(rank, world, store, transport, timeout=TIMEOUT_S, name=f"round {groups}"):
            every_wait(rank, world, late=groups % world)
            again = torch.tensor([float((rank == 0 and time.monotonic() < until) or heard[0] <= SIGNALS)])
            ringlet.all_reduce(again)
        groups += 1
        if not again.item():
            return heard[0], groups


def process_in_a_storm(rank: int, world: int, transport: str, path: str) -> tuple[int, int]:
    store = dist.FileStore(path, world)
    with storm() as heard:
        return rounds(rank, world, transport, store, heard)


@pytest.mark.parametrize("world", (2, 4, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize("transport", ("shared_memory", "tcp", "mixed"))
def test_processes_hear_signals_in_every_wait(pool, tmp_path, transport, world):
    path = str(tmp_path / "store")
    told = pool.values(process_in_a_storm, world, transport, path, join="nothing")
    print(f"{transport} {world}: {sum(heard for heard, _ in told)} handlers ran, {told[0][1]} groups")
    assert all(heard > SIGNALS for heard, _ in told)


def threads_in_a_storm(_rank: int, _world: int, world: int) -> list[tuple[int, int]]:
    told: list[Any] = [None] * world
    with storm_on_all_threads() as heard:

        def run(rank: int) -> None:
            told[rank] = rounds(rank, world, "threads", None, heard)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, world)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
    return told


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)))
def test_threads_hear_signals_in_every_wait(pool, world):
    told = pool.values(threads_in_a_storm, 1, world, join="nothing")[0]
    print(f"threads {world}: {told[0][0]} handlers ran, {told[0][1]} groups")
    assert all(one is not None and one[0] > SIGNALS for one in told)


def signals_blocked(rank: int, world: int, path: str) -> None:
    before = set(os.listdir("/proc/self/task"))
    store = dist.FileStore(path, world)
    with joined(rank, world, store, "tcp", timeout=TIMEOUT_S):
        ringlet.all_reduce(torch.ones(1), async_op=True).wait()
        ringlet.send(torch.ones(1), 1 - rank, async_op=True)
        ringlet.recv(torch.ones(1), 1 - rank, async_op=True).wait()
        made = set(os.listdir("/proc/self/task")) - before
        assert len(made) >= 2, made
        for thread in made:
            until = time.monotonic() + TIMEOUT_S
            while True:  # a thread that begins has all signals blocked for a moment
                status = pathlib.Path("/proc/self/task", thread, "status").read_text()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                if not blocked >> (signal.SIGSEGV - 1) & 1:
                    break
                assert time.monotonic() < until, "faults of a thread's own are blocked"
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPROF, signal.SIGUSR1):
                assert blocked >> (number - 1) & 1, (status, number)
        ringlet.barrier()


def test_threads_of_the_core_leave_signals_to_the_program(pool, tmp_path):
    pool.end()  # the listener's thread stays in a process that had a group before
    pool.values(signals_blocked, 2, str(tmp_path / "store"), join="nothing")
