"""What only ringlet's repository has, in benchmarks/: emulated hosts, what to compare with, named files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from .cases import LIMIT, MPI_PEERS, STREAM, BenchError


def root() -> Path | None:
    """The root of ringlet's repository: around the working directory, or around this file."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "benchmarks" / "peers" / "mpi_ranks.py").is_file():
                return folder
    return None


def module(name: str) -> Any:
    """The module benchmarks.NAME. BenchError outside of the repository."""
    folder = root()
    if folder is None:
        file = f"benchmarks/{name.replace('.', '/')}.py"
        raise BenchError(f"only ringlet's repository has {file}: run this command in it")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(f"benchmarks.{name}")


def prefix(peer: str) -> Path | None:
    """The environment of an MPI library that `make peers` has made."""
    folder = root()
    made = folder / ".venv-peers" / peer if folder else None
    return made if made and (made / "bin" / "mpiexec").exists() and (made / "ok").exists() else None


def installed() -> tuple[str, ...]:
    """The MPI libraries that `make peers` has made."""
    return tuple(peer for peer in MPI_PEERS if prefix(peer))


def require(peers: tuple[str, ...]) -> None:
    """Raises BenchError for missing peers, before anything runs."""
    for peer, name in ((STREAM, "peers.raw_tcp"), (LIMIT, "machine_limit")):
        if peer in peers:
            module(name)
    missing = [peer for peer in peers if peer in MPI_PEERS and not prefix(peer)]
    if missing:
        where = root() or "the root of ringlet's repository"
        raise BenchError(f"no environment for {', '.join(missing)}: run `make peers` in {where}")
