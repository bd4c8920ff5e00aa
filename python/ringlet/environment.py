"""Reads a launcher's environment variables: torchrun, Open MPI, MPICH, Intel MPI, Slurm.

Launchers nest (mpirun in a Slurm job, torchrun in a Slurm step). ringlet uses the first one in this order, which is the
innermost one if both number the ranks:

    torchrun            RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; TORCHELASTIC_RUN_ID
                        names the job
    Open MPI's mpirun   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; PMIX_NAMESPACE names the job
    MPICH, Intel MPI    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS; I_MPI_HYDRA_UUID names Intel's job
    Slurm's srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_LOCALID, SLURM_STEP_NODELIST
    another PMI         PMI_RANK, PMI_SIZE
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ringlet.errors import InvalidUsage

_TORCH_PORT = 29500  # torch's own default
# Below the range that kernels take ports of outgoing connections from.
_FIRST_PORT, _PORTS = 20000, 10000
_MOST = (1 << 31) - 1  # of ranks
_TASKS = re.compile(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?")


@dataclass(frozen=True)
class LaunchInfo:
    """A rank's place among the ranks that its launcher started. None: the launcher does not say.

    job: the name of the job, the same on all its ranks. address: of rank 0's host, if the launcher tells it.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    job: str | None = None
    address: str | None = None


def find(environment: Mapping[str, str] | None = None, *, wanted: str = "rank") -> LaunchInfo:
    """This rank's place. Raises InvalidUsage if no launcher's variables are there, or one of them is missing or not
    a number; wanted: what it then says that there is none of."""
    variables = os.environ if environment is None else environment
    if "RANK" in variables or "WORLD_SIZE" in variables:
        names: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return _place("torchrun", variables, names, job=variables.get("TORCHELASTIC_RUN_ID"))
    if "OMPI_COMM_WORLD_RANK" in variables:
        names = tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        return _place("Open MPI", variables, names, job=variables.get("PMIX_NAMESPACE"))
    if "PMI_RANK" in variables and "MPI_LOCALNRANKS" in variables:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return _place("MPICH's or Intel MPI's mpiexec", variables, names, job=_hydras_job(variables))
    if "SLURM_STEP_NODELIST" in variables and "SLURM_PROCID" in variables:
        return _slurm(variables)
    if "PMI_RANK" in variables:
        return _place("a PMI launcher", variables, ("PMI_RANK", "PMI_SIZE", "", ""))
    if "SLURM_JOB_ID" in variables:
        raise InvalidUsage(
            f"{wanted} is not set: this process is in a Slurm job but not in a step: launch the program with srun"
        )
    give = "store=" if wanted == "store" else "rank= and world="
    raise InvalidUsage(
        f"{wanted} is not set: pass {give}, or launch with `ringlet run -n 2 program.py`, torchrun, "
        "mpirun or srun, which set RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID"
    )


def job_of(world: int) -> str | None:
    """The job of which this process is a rank, if the launcher names it and started as many ranks: the program may have
    numbered them anew, but may not have put ranks of other jobs, or fewer, into its world."""
    try:
        place = find()
    except InvalidUsage:
        return None
    return place.job if place.world == world else None


def master(environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Address and port of the store that rank 0 serves: MASTER_ADDR and MASTER_PORT, or derived from what the launcher
    tells. Raises InvalidUsage if neither is possible."""
    variables = os.environ if environment is None else environment
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if address == "":
        raise InvalidUsage('MASTER_ADDR="" names no host: set it to the host of rank 0')
    if address is not None and port is not None:
        return address, _port(port)
    place = find(variables, wanted="store")
    if place.launcher == "torchrun":
        raise InvalidUsage(
            "store is not set: pass store=, or launch with torchrun, which sets MASTER_ADDR and MASTER_PORT"
        )
    if address is None:
        address = "127.0.0.1" if place.local_world == place.world else place.address
    if address is None:
        raise InvalidUsage(
            f"store is not set: {place.launcher} does not tell the host of rank 0 (of {place.world}): set "
            "MASTER_ADDR to it (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST), or pass store="
        )
    if port is not None:
        return address, _port(port)
    if place.job is None:
        return address, _TORCH_PORT
    return address, _FIRST_PORT + zlib.crc32(place.job.encode()) % _PORTS


def export() -> LaunchInfo:
    """Sets torchrun's variables in this process to what its launcher tells, for programs that read those: then
    `torch.distributed.init_process_group("ringlet")` works under srun and mpirun. Returns the place."""
    place = find()
    address, port = master()
    told = {
        "RANK": place.rank, "WORLD_SIZE": place.world, "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world, "MASTER_ADDR": address, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": place.job,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in told.items() if value is not None})
    return place


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: `node[03-05,9],gpu1` is node03."""
    first = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's counts, one a node: `2(x3),1` is 2, 2, 2, 1. Raises ValueError if the text is no such list."""
    counts: list[int] = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        if found is None:
            raise ValueError(part)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _slurm(variables: Mapping[str, str]) -> LaunchInfo:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    parts = (variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", ""))
    job = ".".join(parts) if all(parts) else None
    alone = variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES")) == "1"
    address = "127.0.0.1" if alone else first_host(variables["SLURM_STEP_NODELIST"])
    if not address:
        raise InvalidUsage(f'SLURM_STEP_NODELIST="{variables["SLURM_STEP_NODELIST"]}" names no host')
    place = _place("Slurm", variables, ("SLURM_PROCID", size, "SLURM_LOCALID", ""), job=job, address=address)
    tasks, node = variables.get("SLURM_STEP_TASKS_PER_NODE"), variables.get("SLURM_NODEID")
    if not tasks or not node:
        return place
    number = _number("SLURM_NODEID", node)
    try:
        return replace(place, local_world=tasks_per_node(tasks)[number])
    except (ValueError, IndexError):
        raise InvalidUsage(
            f'SLURM_STEP_TASKS_PER_NODE="{tasks}" has no number of tasks for SLURM_NODEID={node}'
        ) from None


def _place(
    launcher: str,
    variables: Mapping[str, str],
    names: tuple[str, ...],
    *,
    job: str | None = None,
    address: str | None = None,
) -> LaunchInfo:
    """names: the variables of rank, world, local rank and local world; the first two must be there."""
    rank, world, local_rank, local_world = (
        _number(name, variables[name]) if name in variables else None for name in names
    )
    for name, value in zip(names, (rank, world), strict=False):
        if value is None:
            raise InvalidUsage(f"{name} is not set, though {launcher} sets it; pass rank= and world= instead")
    assert rank is not None and world is not None
    if world == 0:
        raise InvalidUsage(f'{names[1]}="{variables[names[1]]}": a world has at least one rank')
    if rank >= world:
        raise InvalidUsage(f"{names[0]}={rank} is not a rank of {names[1]}={world}: they count from 0 to {world - 1}")
    return LaunchInfo(launcher, rank, world, local_rank, local_world, job, address)


def _number(name: str, text: str, least: int = 0, most: int = _MOST) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidUsage(f'{name}="{text}" is not a number from {least} to {most}')
    return int(text)


def _port(text: str) -> int:
    return _number("MASTER_PORT", text, 1, 65535)


def _hydras_job(variables: Mapping[str, str]) -> str | None:
    """MPICH's launcher names the job nowhere; on one host, its proxy's process is the job."""
    if "I_MPI_HYDRA_UUID" in variables:
        return variables["I_MPI_HYDRA_UUID"]
    process = os.getppid()
    while process > 1:
        try:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return None
        if name == "hydra_pmi_proxy":
            return f"hydra {process}" if variables.get("MPI_LOCALNRANKS") == variables.get("PMI_SIZE") else None
        process = int(rest.split()[1])
    return None
