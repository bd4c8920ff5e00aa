"""Ranks for tests: processes that stay, or threads in one of them. They join a group and run a function.

Importing torch takes seconds, so the processes are forked from one server that has imported it, and serve the whole
session. Every run makes a new group, so a poisoned one harms nobody. A process that dies or hangs is replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import emulated_gpu
import ringlet
from ringlet import _C

# RINGLET_TEST_WORLDS, such as 4,6,7, asks for others.
WORLDS = tuple(int(world) for world in os.environ.get("RINGLET_TEST_WORLDS", "1,2,3,5,8").split(","))
# "mixed": ranks on two hosts in turn, with shared memory inside and TCP between them. "blocks": the first half of the
# ranks on one of them.
TRANSPORTS = ("shared_memory", "threads", "tcp", "mixed")
# Ranks are threads of one process. "gpu": they have the GPU of emulated_gpu.py.
OF_ONE_PROCESS = ("threads", "gpu")
HANG_SECONDS = int(os.environ.get("RINGLET_TEST_HANG_SECONDS", "120"))
# The timeout of a group's calls.
TIMEOUT_SECONDS = float(os.environ.get("RINGLET_TEST_TIMEOUT", "60"))
LIMITED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Outcome:
    """What became of one rank: `value`, or the `kind` of its exception ("died", "hung": of its process)."""

    rank: int
    value: Any = None
    kind: str | None = None
    message: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind or 'well'}: {self.traceback or self.message or self.value}"


@dataclass
class Task:
    function: Callable[..., Any]
    rank: int
    world: int
    args: tuple[Any, ...]
    join: str
    store: str
    timeout: float


def on(world: int | tuple[int, ...] | str, *joins: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test is what a rank does, `test(rank, world, *fixtures)`, and runs on so many ranks, once for each of several
    worlds and of `joins` (as in `Pool.run`; default: shared_memory).

    Or the fixture of that name, such as "two" or "everyone", runs it.
    """

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        if isinstance(world, str):
            test = pytest.mark.usefixtures(world)(test)
        elif isinstance(world, tuple):
            test = pytest.mark.parametrize("world", world)(test)
        if len(joins) > 1:
            test = pytest.mark.usefixtures("join")(pytest.mark.parametrize("join", joins, indirect=True)(test))
        return pytest.mark.on(world, *joins)(test)

    return mark


@contextlib.contextmanager
def on_host(name: str | None) -> Iterator[None]:
    """As if this process were on a host of that name."""
    if name is not None:
        os.environ["RINGLET_HOST_ID"] = name
    try:
        yield
    finally:
        os.environ.pop("RINGLET_HOST_ID", None)


def with_kernels(rank: int, world: int, level: str) -> dict[str, Any]:
    """Has this process take the CPU kernels of that level, before its first use of any; what it has, and has chosen."""
    os.environ["RINGLET_CPU_KERNELS"] = level
    return _C.kernels()


_kept: list[Any] = []  # gloo's groups of the run before


def leave_torch(backend: str) -> None:
    """Ends torch.distributed in this process. gloo aborts the process where a thread of its own is the last to let go
    of a group: its groups are kept until the process ends, or until it leaves the next ones."""
    _kept[:] = list(dist.distributed_c10d._world.pg_map) if backend != "ringlet" else []
    dist.destroy_process_group()


def host_of(rank: int, world: int, place: str) -> str | None:
    return {"mixed": f"host {rank % 2}", "blocks": f"host {2 * rank // world}"}.get(place)


@contextlib.contextmanager
def joined(rank: int, world: int, store: dist.Store | None, place: str, **options: Any) -> Iterator[ringlet.Group]:
    """In a group of ringlet's, which ends with the block. place: one of TRANSPORTS or "blocks"."""
    host = host_of(rank, world, place)
    with on_host(host):
        group = ringlet.init(rank, world, store, transport=place if host is None else "auto", **options)
    try:
        yield group
    finally:
        ringlet.finalize()


@contextlib.contextmanager
def membership(task: Task) -> Iterator[None]:
    """What `join` means: a ringlet group of processes or threads, torch.distributed on a backend, or nothing."""
    limit = timedelta(seconds=task.timeout)
    if task.join in OF_ONE_PROCESS:
        if task.join == "gpu":
            emulated_gpu.load()
        with joined(task.rank, task.world, None, "threads", timeout=limit, name=task.store):
            yield
    elif task.join in (*TRANSPORTS, "blocks"):
        store = dist.FileStore(task.store, task.world)
        with joined(task.rank, task.world, store, task.join, timeout=limit, name=task.store):
            yield
    elif task.join.startswith("dist:"):
        store = dist.FileStore(task.store, task.world)
        backend, _, place = task.join.removeprefix("dist:").partition("@")
        options = ringlet.BackendOptions(transport="tcp") if place == "tcp" else None
        with on_host(host_of(task.rank, task.world, place)):
            dist.init_process_group(
                backend or None, store=store, rank=task.rank, world_size=task.world, timeout=limit, pg_options=options
            )
            try:
                yield
            finally:
                leave_torch(backend)
    else:
        yield


def carry_out(task: Task) -> Outcome:
    try:
        with membership(task):
            return Outcome(task.rank, task.function(task.rank, task.world, *task.args))
    except (Exception, pytest.fail.Exception) as error:
        return Outcome(task.rank, None, type(error).__name__, str(error), traceback.format_exc())


def carry_out_on_threads(task: Task) -> list[Outcome]:
    outcomes: list[Any] = [None] * task.world

    def run(rank: int) -> None:
        mine = Task(task.function, rank, task.world, task.args, task.join, task.store, task.timeout)
        outcomes[rank] = carry_out(mine)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(task.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def serve(connection: multiprocessing.connection.Connection) -> None:
    """The life of one process of the pool."""
    faulthandler.enable()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool's end
        while True:
            task = connection.recv()
            connection.send(carry_out_on_threads(task) if task.join in OF_ONE_PROCESS else carry_out(task))


def free_ports(wanted: int) -> list[int]:
    """Ports of this machine that nobody listens on, and that the kernel gives to nobody who asks for any."""
    kernels = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as probes:
        while len(ports) < wanted:
            port = random.SystemRandom().choice(range(1024, kernels) or range(1024, 1 << 16))
            with contextlib.suppress(OSError):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports


class Worker:
    def __init__(self, context: Any):
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.connection.close()  # the process sees the end of its tasks
        self.process.join(5)
        self.process.kill()
        self.process.join()


class Pool:
    """Processes that take a module-level function; the first `world` of them are the ranks of a run."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._numbers = itertools.count()
        self._workers: list[Worker] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.nn.parallel", "ringlet", "numpy", "pytest"])

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        join: str = "shared_memory",
        timeout: float = TIMEOUT_SECONDS,
    ) -> list[Outcome]:
        """`function(rank, world, *args)` on every rank; what became of each, errors included.

        join: one of TRANSPORTS, "blocks" or "gpu" (ringlet.init), "dist:BACKEND" (init_process_group) or "nothing".
                "dist:" (torch's default, gloo) and "dist:BACKEND@PLACE": place is "mixed", "blocks" or "tcp".
        """
        processes = 1 if join in OF_ONE_PROCESS else world
        workers = self._staff(processes)
        store = str(self._folder / f"store-{next(self._numbers)}")
        for rank, worker in enumerate(workers):
            worker.connection.send(Task(function, rank, world, args, join, store, timeout))
        outcomes = self._collect(workers)
        for worker, outcome in zip(workers, outcomes, strict=True):
            if any(one.kind is not None for one in (outcome if isinstance(outcome, list) else [outcome])):
                worker.end()  # what made it fail may still be in the process
        return outcomes[0] if isinstance(outcomes[0], list) else outcomes

    def values(self, function: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
        """What `function` returned on every rank; fails the test where a rank did not return."""
        outcomes = self.run(function, world, *args, **options)
        failed = [outcome for outcome in outcomes if outcome.kind is not None]
        # A rank that fails its own check takes its peers with it: the cause first.
        failed.sort(key=lambda outcome: outcome.kind in ("PeerLost", "Timeout"))
        if failed:
            self.end()  # what made it fail may still be in these processes
            pytest.fail("\n".join(map(str, failed)), pytrace=False)
        return [outcome.value for outcome in outcomes]

    def fork(self, function: Callable[..., Any], *args: Any) -> Any:
        """A process of its own, which has imported torch, runs the function."""
        process = self._context.Process(target=function, args=args, daemon=True)
        process.start()
        return process

    def processes(self, world: int) -> list[Any]:
        """The processes of the next run of `world` ranks, for tests that stop or kill them."""
        return [worker.process for worker in self._staff(world)]

    def end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _staff(self, processes: int) -> list[Worker]:
        before = {name: os.environ.get(name) for name in LIMITED}
        os.environ.update(LIMITED)
        try:
            for index in range(processes):
                if index == len(self._workers):
                    self._workers.append(Worker(self._context))
                elif not self._workers[index].process.is_alive():
                    self._workers[index].end()
                    self._workers[index] = Worker(self._context)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return self._workers[:processes]

    def _collect(self, workers: list[Worker]) -> list[Any]:
        outcomes: list[Any] = [None] * len(workers)
        deadline = time.monotonic() + HANG_SECONDS
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    workers[rank].process.join()
                    outcomes[rank] = Outcome(rank, None, "died", f"exit code {workers[rank].process.exitcode}")
            if not ready:
                for connection in [connection for connection in waiting]:
                    rank = waiting.pop(connection)
                    os.kill(workers[rank].process.pid, 6)  # SIGABRT: faulthandler prints where it hangs
                    workers[rank].process.join()
                    outcomes[rank] = Outcome(rank, None, "hung", f"no answer in {HANG_SECONDS} s")
        return outcomes
