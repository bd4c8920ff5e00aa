"""The MPI libraries to compare with: their settings, and the commands that start their ranks.

Each has its own environment `.venv-peers/NAME` (`make peers`), because they share file names. They run with their own
defaults, except for the settings here, which the results file repeats.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hosts import INTERFACE, Hosts

from ringlet.bench.jobs import BenchError

_ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".venv-peers"
_PROGRAM = Path(__file__).with_name("mpi_ranks.py")


@dataclass(frozen=True)
class Settings:
    """The settings of one MPI: always, if ranks outnumber cores, and on emulated hosts."""

    environment: dict[str, str]
    oversubscribed_environment: dict[str, str]
    oversubscribed_arguments: tuple[str, ...] = ()
    hosts_environment: dict[str, str] = field(default_factory=dict)


SETTINGS = {
    "openmpi": Settings(
        # It refuses to start as root otherwise.
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        {},
        ("--map-by", ":OVERSUBSCRIBE"),
        # Each host believes the cores are its own: ranks would be bound to the same ones and never yield them.
        {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": INTERFACE,
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_prte_if_include": INTERFACE,
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        },
    ),
    # Its release-gather collectives spin without ever yielding: 8 ms for 4 bytes on 4 ranks and 2 cores, and 10 µs so.
    "mpich": Settings(
        {},
        {f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir" for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")}
        | {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
        # UCX tells hosts apart by the kernel's boot id, and would use shared memory between emulated ones.
        hosts_environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE},
    ),
    # Its other fabrics need a libfabric, which its wheel does not bring.
    "intelmpi": Settings({"I_MPI_FABRICS": "shm"}, {}),
}


def prefix(peer: str) -> Path | None:
    """The environment of an MPI library that `make peers` has made."""
    made = _ENVIRONMENTS / peer
    return made if (made / "bin" / "mpiexec").exists() and (made / "ok").exists() else None


def installed() -> tuple[str, ...]:
    """The MPI libraries that `make peers` has made."""
    return tuple(peer for peer in SETTINGS if prefix(peer))


def require(peers: Iterable[str]) -> None:
    """BenchError for MPI libraries that are missing."""
    missing = [peer for peer in peers if peer in SETTINGS and not prefix(peer)]
    if missing:
        raise BenchError(f"no environment for {', '.join(missing)}: run `make peers` in {_ENVIRONMENTS.parent}")


def oversubscribed(world: int) -> bool:
    return world > len(os.sched_getaffinity(0))


def environment(peer: str, world: int, hosts: Hosts | None = None) -> dict[str, str]:
    """The variables that the peer is given beyond its defaults."""
    settings = SETTINGS[peer]
    told = settings.environment | (settings.oversubscribed_environment if oversubscribed(world) else {})
    return told | (settings.hosts_environment if hosts else {})


def command(peer: str, world: int, job: str, socket_path: str, hosts: Hosts | None = None) -> list[str]:
    """The command that starts all of the peer's ranks; on emulated hosts, from the first of them."""
    require([peer])
    binaries = _ENVIRONMENTS / peer / "bin"
    program = [str(binaries / "python"), str(_PROGRAM), job, socket_path]
    start = [str(binaries / "mpiexec"), *_arguments(peer, world, hosts), "-n", str(world), *program]
    return hosts.command(0, start) if hosts else start


def _arguments(peer: str, world: int, hosts: Hosts | None) -> list[str]:
    if hosts is None:
        return list(SETTINGS[peer].oversubscribed_arguments) if oversubscribed(world) else []
    cluster, shell = hosts.cluster, str(hosts.remote_shell())
    cyclic = cluster.numbering == "cyclic"
    if peer == "openmpi":
        slots = ",".join(f"{name}:{cluster.ranks_per_host}" for name in hosts.names)
        return ["--prtemca", "plm_ssh_agent", shell, "--host", slots, "--map-by", "node" if cyclic else "slot"]
    # Hydra goes round its list as often as there are ranks.
    slots = ",".join(f"{name}:{1 if cyclic else cluster.ranks_per_host}" for name in hosts.names)
    return ["-launcher", "rsh", "-launcher-exec", shell, "-iface", INTERFACE, "-hosts", slots]


def describe(peer: str, world: int, hosts: Hosts | None = None) -> str:
    """The differences from the peer's defaults, for the results file."""
    told = [f"{key}={value}" for key, value in environment(peer, world, hosts).items()]
    if hosts is None:  # the arguments on hosts say where the ranks are, which the cluster tells
        told += _arguments(peer, world, None)
    return " ".join(told) or "defaults"


def shared_files(pids: Iterable[int]) -> set[Path]:
    """The files under /dev/shm that processes have mapped; none of those that have ended."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in maps if "/dev/shm/" in line and _is_ours(line)}
    return found


def _is_ours(line: str) -> bool:
    """Whether a line of /proc/PID/maps is of a file that has this name here: an emulated host has its own /dev/shm."""
    _, _, _, device, inode, name = line.split(maxsplit=5)
    major, minor = (int(part, 16) for part in device.split(":"))
    try:
        found = os.stat(name)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (os.makedev(major, minor), int(inode))
