"""The cases to measure: sizes, configurations, and the arithmetic of bandwidth.

`bytes` is the size of the largest buffer that a rank passes and `count` the elements that a rank contributes or
receives, as nccl-tests prints them: for all-reduce, broadcast and reduce, `count` elements are `bytes`; for the
others `bytes` is `world` blocks of `count` elements.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .jobs import BenchError, Job, Jobs
from .ranks.case import ITEM_BYTES, KEEP_BYTES, LISTS, REDUCING, SPLIT, Case

MPI_PEERS = ("openmpi", "mpich", "intelmpi")
STREAM = "stream"  # one plain TCP connection that carries the bytes once: what a link gives
NCCL = "nccl"  # through torch.distributed
LIMIT = "limit"  # no library: the least time that two cores of this machine allow
PEERS = ("gloo", *MPI_PEERS, STREAM, NCCL, LIMIT)  # in the order of tables; benchmarks/ has all but gloo and nccl
DEVICES = ("cpu", "cuda")
OWN_OF_NCCL = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")  # have the algorithm "nccl"


@dataclass(frozen=True)
class Config:
    """One line of a plot: a library and how it is used. `job` names the processes that serve it."""

    library: str
    algorithm: str
    memory: str
    via: str

    @property
    def job(self) -> str:
        return f"{self.library}/{self.via}"

    def __str__(self) -> str:
        if self.library != "ringlet":
            return self.library
        return f"ringlet {self.algorithm}, {self.memory}" + (", via torch" if self.via == "torch" else "")


@dataclass(frozen=True)
class Sweep:
    """Everything that one `ringlet bench` measures. `iterations` of 0: as many calls as fill `sample_ms`.

    transport: ringlet's, as `ringlet.init` takes it; "" leaves the choice to it.
    device: of the buffers; rank r's are on GPU r modulo the number of GPUs. variables: of the ranks' environment.
    """

    worlds: tuple[int, ...] = (2,)
    collectives: tuple[str, ...] = ("all_reduce",)
    algorithms: tuple[str, ...] = ("auto",)
    begin_bytes: int = 4
    end_bytes: int = 256 << 20
    factor: int = 4
    memory: tuple[str, ...] = ("registered", "ordinary")
    via: tuple[str, ...] = ("api",)
    peers: tuple[str, ...] = ()
    dtype: str = "float32"
    op: str = "sum"
    iterations: int = 0
    warmup: int = 5
    check: bool = True
    rounds: int = 5
    sample_ms: float = 50.0
    timeout_s: float = 120.0
    transport: str = ""
    device: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        on_gpu = self.device != "cpu"
        slow = [peer for peer in self.peers if peer not in (NCCL, "gloo")]
        for wrong, what in (
            (not on_gpu and NCCL in self.peers, "peers: nccl needs --device cuda"),
            (on_gpu and slow, f"peers: {', '.join(slow)} cannot be measured on GPUs: give nccl or gloo"),
            (on_gpu and "allocator" in self.memory,
             "memory: allocator replaces torch's on the host only: for a GPU give registered or ordinary"),
            (self.end_bytes < self.begin_bytes, "sizes: -e must be at least -b"),
        ):  # fmt: skip
            if wrong:
                raise BenchError(what)

    def environment(self) -> dict[str, str]:
        """Variables of the ranks. Registered memory on a GPU: two buffers of the largest size, and what smaller ones
        keep."""
        if self.device == "cpu" or "registered" not in self.memory:
            return dict(self.variables)
        mebibytes = math.ceil((2 * self.end_bytes + 8 * KEEP_BYTES) / (1 << 20))
        return {"RINGLET_GPU_HEAP_MIB": os.environ.get("RINGLET_GPU_HEAP_MIB", str(mebibytes)), **self.variables}

    def refusal(self) -> str:
        """Why this machine cannot run it; empty if it can."""
        return ""

    def circumstances(self) -> dict[str, Any]:
        """What is to be told with the figures, beside the machine, after the run."""
        return {}

    def jobs(self, world: int) -> AbstractContextManager[Mapping[str, Job]]:
        """The ranks of all configurations."""
        return Jobs([config.job for config in self.configs()], world, self)

    @property
    def medium(self) -> str:
        """What rules call the way of calls over TCP."""
        return "hosts"

    def configs(self) -> list[Config]:
        """ringlet's ways, then the peers; through torch there is no choice of algorithm."""
        own = [
            Config("ringlet", algorithm, memory, via)
            for via in self.via
            for memory in self.memory
            for algorithm in (self.algorithms if via == "api" or not self.algorithms else ("auto",))
        ]
        ways = {"gloo": "torch", NCCL: "torch", STREAM: "socket", LIMIT: "threads"}
        return own + [Config(peer, "default", "ordinary", ways.get(peer, "mpi4py")) for peer in self.peers]

    def named(self, config: Config, case: Case) -> str:
        """The configuration, with its collective and its world if the sweep has several."""
        collective = "" if len(self.collectives) == 1 else f", {case.collective}"
        return f"{config}{collective}" + ("" if len(self.worlds) == 1 else f", {case.world} ranks")

    def cases(self, world: int, config: Config) -> list[Case]:
        """The config's cases, collective after collective, smallest first."""
        return [
            Case(
                collective, config.algorithm, config.memory, config.via, world, size, count, self.dtype,
                self.op if collective in REDUCING else "none",
            )
            for collective in self.collectives
            for size, count in sizes(self, world, collective)
        ]  # fmt: skip


def sizes(sweep: Sweep, world: int, collective: str) -> list[tuple[int, int]]:
    """(bytes, count) from begin to end; rounded down to whole elements, or whole blocks, and never to none."""
    if collective == "barrier":
        return [(0, 0)]
    item = ITEM_BYTES[sweep.dtype]
    block = item * (world if LISTS.get(collective, collective) in SPLIT else 1)
    found, size = {}, sweep.begin_bytes
    while size <= sweep.end_bytes:
        if size >= block:
            found[size // block * block] = size // block
        size *= sweep.factor
    return sorted(found.items())


def format_bytes(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def bus_factor(collective: str, world: int, library: str = "") -> float:
    """busbw / algbw: the bytes that the busiest link must carry per byte (nccl-tests, doc/PERFORMANCE.md). The stream
    carries its bytes once, whatever it is compared with."""
    if library == STREAM:
        return 1.0
    if collective == "all_reduce":
        return 2 * (world - 1) / world
    return (world - 1) / world if LISTS.get(collective, collective) in SPLIT else 1.0
