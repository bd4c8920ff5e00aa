"""Local ranks without a launcher: processes (or threads) that join one group, run a function and report errors."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from ringlet import group as groups
from ringlet import log
from ringlet.errors import InvalidUsage, ResourceError
from ringlet.joining import DEFAULT_TIMEOUT, default_transport, whole
from ringlet.rank_arguments import ByValue, MemoryFile, main_is_a_file
from ringlet.supervisor import GRACE_S, End, RankProcesses, Terminated, end_with_parent, signal_name, termination_raises

_MOST_RANKS = 1024  # as of `ringlet run`; more processes are a mistake that a machine may not survive
_INTERRUPTED = 130  # 128 + SIGINT, as a shell says it


def spawn(
    main: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    transport: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> None:
    """Runs `main(rank, *args)` on `nprocs` ranks that have joined the default group.

    main: a function of a module, and args: plain data, because both are pickled, unless ranks are threads. So each rank
    has copies of args; tensors that `share_memory_()` has moved stay shared. Ranks that are threads share args.

    Returns when all ranks have. If one rank fails, spawn ends the others and raises the rank's traceback
    (torch.multiprocessing's ProcessRaisedException; for threads RuntimeError). Ctrl-C, SIGTERM and SIGHUP end the
    ranks: at Ctrl-C each rank that waits or runs Python raises KeyboardInterrupt, as does the caller. After 5 s, or at
    a second Ctrl-C, spawn kills the ranks that still run. Ranks do not outlive the calling process.
    """
    if not callable(main):
        raise InvalidUsage(f"spawn: main is {main!r:.60}; pass a function that takes a rank")
    log.keep_standard_descriptors()
    nprocs = whole(nprocs, "spawn: nprocs")
    if not 1 <= nprocs <= _MOST_RANKS:
        raise InvalidUsage(f"spawn: nprocs must be from 1 to {_MOST_RANKS}, got {nprocs}")
    transport = default_transport() if transport is None else transport
    if transport == "threads":
        _spawn_threads(main, nprocs, args, timeout)
    elif getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise InvalidUsage(
            "spawn: a rank imports the program that started it, and this program starts ranks when it is imported: "
            'put the call to spawn under `if __name__ == "__main__":`'
        )
    else:
        _spawn_processes(main, nprocs, args, (transport, timeout))


@dataclass(frozen=True)
class _Job:
    """The arguments of every rank's process."""

    call: ByValue  # main and args
    world: int
    store: MemoryFile
    membership: tuple[str, timedelta | float]  # transport and timeout
    parent: int


@dataclass(frozen=True)
class _Report:
    """A rank's report to its parent: that it handles signals, or (text) the traceback of its failure, and when."""

    text: str = ""
    seconds: float = 0.0


def _spawn_processes(
    main: Callable[..., Any], world: int, args: tuple[Any, ...], membership: tuple[str, timedelta | float]
) -> None:
    main_is_a_file()
    with contextlib.closing(MemoryFile.make()) as store, termination_raises():
        ranks = _Ranks(_Job(ByValue((main, args)), world, store, membership, os.getpid()))
        try:
            ranks.start()
            failed = ranks.watch()
        except BaseException as error:
            ranks.end(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
            raise
    if failed is not None:
        raise ranks.failure(failed)


class _Ranks(RankProcesses):
    """The processes of one spawn()."""

    def __init__(self, job: _Job):
        super().__init__()
        self._job = job
        self._pipes: dict[Any, int] = {}  # to read from, with their ranks, until they end
        self._listening: set[int] = set()
        self._failures: dict[int, _Report] = {}

    def start(self) -> None:
        """Starts the ranks. A rank that is not ready yet keeps SIGINT pending: its imports would print tracebacks."""
        context = torch.multiprocessing.get_context("spawn")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self._job.world):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, self._job, theirs), name=f"rank {rank}")
                try:
                    process.start()
                except OSError as error:
                    raise _not_started(rank, self._job.world, error) from error
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise InvalidUsage(
                        f"spawn: main or args cannot be pickled ({error}): pass a function of a module, not a lambda "
                        'or a function in another, and plain data; or pass transport="threads"'
                    ) from error
                theirs.close()
                self.processes.append(process)
                self._pipes[ours] = rank
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def turn(self, seconds: float | None) -> None:
        sentinels = [self.processes[rank].sentinel for rank in self.running()]
        for ready in multiprocessing.connection.wait([*sentinels, *self._pipes], seconds):
            if ready in self._pipes:
                self._receive(ready)
        for rank in self.running():
            code = self.processes[rank].exitcode
            if code is not None:
                self.ends[rank] = End(code, time.monotonic())

    def _receive(self, pipe: Any) -> None:
        try:
            while pipe.poll():
                report = pipe.recv()
                if report.text:
                    self._failures[self._pipes[pipe]] = report
                else:
                    self._listening.add(self._pipes[pipe])
        except (EOFError, OSError):
            pipe.close()
            del self._pipes[pipe]

    def send(self, rank: int, number: int) -> None:
        process = self.processes[rank]
        if number == signal.SIGINT and rank not in self._listening:
            process.kill()
        else:
            os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def failed(self) -> set[int]:
        return super().failed() | set(self._failures)

    def left(self, rank: int) -> tuple[float, bool] | None:
        """A rank reports its failure before the others see that it goes."""
        return (self._failures[rank].seconds, False) if rank in self._failures else None

    def failure(self, rank: int) -> ProcessException:
        """What to raise for the rank that failed."""
        pid = self.processes[rank].pid
        if rank in self._failures:
            message = f"\n\n-- Process {rank} terminated with the following error:\n{self._failures[rank].text}"
            return ProcessRaisedException(message, rank, pid)
        code = self.ends[rank].code
        if code < 0:
            name = signal_name(-code)
            return ProcessExitedException(f"process {rank} terminated with signal {name}", rank, pid, code, name)
        return ProcessExitedException(f"process {rank} terminated with exit code {code}", rank, pid, code)


def _not_started(rank: int, world: int, error: Exception) -> ResourceError:
    return ResourceError(f"spawn: rank {rank} of {world} cannot be started: {error}; is there a limit (ulimit -u, -v)?")


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Handles SIGINT: a terminal's Ctrl-C reaches every process of the job, and then the parent sends its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _rank_main(rank: int, job: _Job, reports: Any) -> None:
    end_with_parent(job.parent)
    try:
        try:
            signal.signal(signal.SIGINT, interrupt_once)
            reports.send(_Report())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            transport, timeout = job.membership
            store = dist.FileStore(job.store.path(), job.world)
            groups.init(rank, job.world, store, transport=transport, timeout=timeout)
            main, args = job.call.value
            main(rank, *args)
        except (Exception, KeyboardInterrupt):
            # Before the others see that this rank goes, and fail too.
            reports.send(_Report(traceback.format_exc(), time.monotonic()))
            raise
        finally:
            groups.finalize()
    except KeyboardInterrupt:
        _end_at_once(_INTERRUPTED)
    except Exception:
        sys.exit(1)


def _end_at_once(code: int) -> None:
    """Ends this process at once. Python's own exit frees every module first, which takes long with torch."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or its reader may be gone
            stream.flush()
    os._exit(code)


def _spawn_threads(main: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: timedelta | float) -> None:
    failures: list[tuple[int, BaseException, str]] = []
    name = f"spawn-{id(failures)}"

    def note(rank: int, error: BaseException) -> None:
        failures.append((rank, error, traceback.format_exc()))

    # Not join(): CPython takes a thread whose join() a signal interrupts for ended (bpo-45274).
    ended = [threading.Event() for _ in range(world)]

    def run(rank: int) -> None:
        try:
            # The caller has it, and it may find a rank on its way out.
            with contextlib.suppress(KeyboardInterrupt):
                take_part(rank)
        finally:
            ended[rank].set()

    def take_part(rank: int) -> None:
        try:
            groups.init(rank, world, transport="threads", timeout=timeout, name=name)
        except BaseException as error:
            note(rank, error)
            return
        try:
            main(rank, *args)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                note(rank, error)  # before the others see that this rank goes
        finally:
            groups.finalize()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for event in ended:
            event.wait()
    except BaseException as cause:
        _interrupt(started, ended[: len(started)])
        if len(started) < world and isinstance(cause, RuntimeError):
            raise _not_started(len(started), world, cause) from cause
        raise
    for thread in threads:
        thread.join()
    if failures:
        rank, error, text = failures[0]
        raise RuntimeError(f"rank {rank} of {world} (a thread) failed:\n\n{text}") from error


def _interrupt(threads: list[threading.Thread], ended: list[threading.Event]) -> None:
    """Raises KeyboardInterrupt in threads that run Python or wait in ringlet, and waits until they have ended."""
    for thread in threads:
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
            )
    until = time.monotonic() + GRACE_S
    for thread, event in zip(threads, ended, strict=True):
        if event.wait(max(0.0, until - time.monotonic())):
            thread.join()
