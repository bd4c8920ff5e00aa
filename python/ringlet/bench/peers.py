"""The MPI libraries to compare with: where they are and how their ranks are started.

Each has its own environment `.venv-peers/NAME` (`make peers`): they share file names. They run with their own
defaults but for what is listed here, and the results file repeats it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .cases import MPI_PEERS
from .errors import BenchError

_PROGRAM = Path("benchmarks/peers/mpi_ranks.py")


@dataclass(frozen=True)
class Settings:
    """What one MPI is told: always, and where ranks outnumber cores."""

    environment: dict[str, str]
    oversubscribed_environment: dict[str, str]
    oversubscribed_arguments: tuple[str, ...] = ()


SETTINGS = {
    "openmpi": Settings(
        # It refuses to start as root otherwise.
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        {},
        ("--map-by", ":OVERSUBSCRIBE"),
    ),
    # Its release-gather collectives spin without ever yielding: 8 ms for 4 bytes on 4 ranks and 2 cores, and 10 µs so.
    "mpich": Settings(
        {},
        {f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir" for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")}
        | {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
    ),
    # Its other fabrics need a libfabric, which its wheel does not bring.
    "intelmpi": Settings({"I_MPI_FABRICS": "shm"}, {}),
}


def repository() -> Path | None:
    """The root of ringlet's repository: around the working directory, or around this file."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / _PROGRAM).is_file():
                return folder
    return None


def _prefix(peer: str) -> Path | None:
    root = repository()
    prefix = root / ".venv-peers" / peer if root else None
    return prefix if prefix and (prefix / "bin" / "mpiexec").exists() and (prefix / "ok").exists() else None


def installed() -> tuple[str, ...]:
    """The MPI peers that `make peers` has made."""
    return tuple(peer for peer in MPI_PEERS if _prefix(peer))


def require(peers: tuple[str, ...]) -> None:
    """Refuse peers that are not there, before anything runs."""
    missing = [peer for peer in peers if peer in MPI_PEERS and not _prefix(peer)]
    if missing:
        where = repository() or "the root of ringlet's repository"
        raise BenchError(f"no environment for {', '.join(missing)}: run `make peers` in {where}")


def oversubscribed(world: int) -> bool:
    return world > len(os.sched_getaffinity(0))


def environment(peer: str, world: int) -> dict[str, str]:
    """The variables that the peer is given beyond its defaults."""
    settings = SETTINGS[peer]
    return settings.environment | (settings.oversubscribed_environment if oversubscribed(world) else {})


def command(peer: str, world: int, job: str, socket_path: str) -> list[str]:
    """The command that starts all of the peer's ranks."""
    prefix, root = _prefix(peer), repository()
    if prefix is None or root is None:
        raise BenchError(f"no environment for {peer}: run `make peers`")
    extra = SETTINGS[peer].oversubscribed_arguments if oversubscribed(world) else ()
    program = [str(prefix / "bin" / "python"), str(root / _PROGRAM), job, socket_path]
    return [str(prefix / "bin" / "mpiexec"), *extra, "-n", str(world), *program]


def describe(peer: str, world: int) -> str:
    """What differs from the peer's defaults, for the results file."""
    extra = SETTINGS[peer].oversubscribed_arguments if oversubscribed(world) else ()
    return " ".join([*(f"{key}={value}" for key, value in environment(peer, world).items()), *extra]) or "defaults"
