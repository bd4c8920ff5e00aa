"""Local ranks without a launcher: processes (or threads) that join one group, run a function and report errors."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from ringlet import group as groups
from ringlet.errors import InvalidUsage


def spawn(
    main: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    transport: str | None = None,
    timeout: timedelta | float = groups.DEFAULT_TIMEOUT,
) -> None:
    """Runs `main(rank, *args)` on `nprocs` ranks that have joined the default group.

    main: importable (it is pickled), unless ranks are threads. Returns when all ranks have; when one fails the others
    are ended and its traceback is raised here (torch.multiprocessing's ProcessRaisedException; threads: RuntimeError).
    """
    if nprocs < 1:
        raise InvalidUsage(f"spawn: nprocs={nprocs} is not at least 1")
    transport = groups.default_transport() if transport is None else transport
    if transport == "threads":
        _spawn_threads(main, nprocs, args, timeout)
        return
    with tempfile.TemporaryDirectory(prefix="ringlet-") as folder:
        job = _Job(main, args, nprocs, folder, transport, timeout)
        context = torch.multiprocessing.start_processes(_rank_main, (job,), nprocs, join=False)
        try:
            while not context.join():
                pass
        except ProcessException as seen:
            raise _cause(seen, context.processes, pathlib.Path(folder)) from None
        finally:
            for name in context.error_files:
                pathlib.Path(name).unlink(missing_ok=True)


def _cause(seen: ProcessException, processes: list[Any], folder: pathlib.Path) -> ProcessException:
    """The failure that the others follow from: torch reports the rank whose process ended first."""
    for rank, process in enumerate(processes):
        if process.exitcode < 0 and process.exitcode != -signal.SIGTERM:  # which torch sends to the others
            name = signal.Signals(-process.exitcode).name
            message = f"process {rank} terminated with signal {name}"
            return ProcessExitedException(message, rank, process.pid, process.exitcode, name)
    first = folder / "first failure"
    if first.exists():
        number, text = first.read_text().split("\n", 1)
        message = f"\n\n-- Process {number} terminated with the following error:\n{text}"
        return ProcessRaisedException(message, int(number), processes[int(number)].pid)
    return seen


def _note_failure(rank: int, folder: str) -> None:
    """Keeps the traceback in hand if this rank is the first that failed; before the others see that it goes."""
    own = pathlib.Path(folder, f"failure {rank}")
    own.write_text(f"{rank}\n{traceback.format_exc()}")
    with contextlib.suppress(FileExistsError):
        os.link(own, pathlib.Path(folder, "first failure"))


@dataclass(frozen=True)
class _Job:
    """What every rank's process is told."""

    main: Callable[..., Any]
    args: tuple[Any, ...]
    world: int
    folder: str
    transport: str
    timeout: timedelta | float


def _rank_main(rank: int, job: _Job) -> None:
    store = dist.FileStore(str(pathlib.Path(job.folder, "store")), job.world)
    try:
        groups.init(rank, job.world, store, transport=job.transport, timeout=job.timeout)
        job.main(rank, *job.args)
    except Exception:
        _note_failure(rank, job.folder)
        raise
    finally:
        groups.finalize()


def _spawn_threads(main: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: timedelta | float) -> None:
    failures: list[tuple[int, BaseException, str]] = []
    name = f"spawn-{id(failures)}"

    def note(rank: int, error: BaseException) -> None:
        failures.append((rank, error, traceback.format_exc()))

    def run(rank: int) -> None:
        try:
            groups.init(rank, world, transport="threads", timeout=timeout, name=name)
        except BaseException as error:
            note(rank, error)
            return
        try:
            main(rank, *args)
        except BaseException as error:
            note(rank, error)  # before the others see that this rank goes
        finally:
            groups.finalize()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error, text = failures[0]
        raise RuntimeError(f"rank {rank} of {world} (a thread) failed:\n\n{text}") from error
