"""Local ranks without a launcher: processes (or threads) that join one group, run a function and report errors."""

from __future__ import annotations

import pathlib
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ringlet import group as groups
from ringlet.errors import InvalidUsage


def spawn(
    main: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    transport: str = "shared_memory",
    timeout: timedelta | float = groups.DEFAULT_TIMEOUT,
) -> None:
    """Runs `main(rank, *args)` on `nprocs` ranks that have joined the default group.

    main: importable (it is pickled), unless ranks are threads. Returns when all ranks have; when one fails the others
    are ended and its traceback is raised here (torch.multiprocessing's ProcessRaisedException; threads: RuntimeError).
    """
    if nprocs < 1:
        raise InvalidUsage(f"spawn: nprocs={nprocs} is not at least 1")
    if transport == "threads":
        _spawn_threads(main, nprocs, args, timeout)
        return
    with tempfile.TemporaryDirectory(prefix="ringlet-") as folder:
        store = str(pathlib.Path(folder) / "store")
        torch.multiprocessing.spawn(_rank_main, (main, nprocs, store, args, transport, timeout), nprocs)


def _rank_main(
    rank: int,
    main: Callable[..., Any],
    world: int,
    path: str,
    args: tuple[Any, ...],
    transport: str,
    timeout: timedelta | float,
) -> None:
    groups.init(rank, world, dist.FileStore(path, world), transport=transport, timeout=timeout)
    try:
        main(rank, *args)
    finally:
        groups.finalize()


def _spawn_threads(main: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: timedelta | float) -> None:
    failures: list[tuple[int, BaseException, str]] = []
    name = f"spawn-{id(failures)}"

    def run(rank: int) -> None:
        try:
            groups.init(rank, world, transport="threads", timeout=timeout, name=name)
            try:
                main(rank, *args)
            finally:
                groups.finalize()
        except BaseException as error:
            failures.append((rank, error, traceback.format_exc()))

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error, text = failures[0]
        raise RuntimeError(f"rank {rank} of {world} (a thread) failed:\n\n{text}") from error
