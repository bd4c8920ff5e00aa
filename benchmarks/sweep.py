"""Sweeps of `python -m benchmarks`: as ringlet's own, also on emulated hosts, and with more libraries beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import hosts, machine_limit, uplinks
from benchmarks.clusters import Cluster
from benchmarks.hosts import Hosts
from benchmarks.peers import mpi, raw_tcp

from ringlet.bench import cases, jobs
from ringlet.bench.cases import LIMIT, MPI_PEERS, STREAM
from ringlet.bench.jobs import BenchError
from ringlet.bench.ranks import case
from ringlet.joining import congestion_controls

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sweep(cases.Sweep):
    """hosts: to run on, whose world `worlds` then is; None: this machine, as it is."""

    hosts: Cluster | None = None
    limits: list[machine_limit.Cores] = field(default_factory=list)  # as they are measured

    def __post_init__(self) -> None:
        super().__post_init__()
        for wrong, what in (
            (self.hosts and self.device != "cpu", "hosts: emulated hosts have no GPU: leave out --cluster or --device"),
            (self.hosts and self.worlds != (self.hosts.world,),
             f"world: {self.hosts} has {self.hosts and self.hosts.world} ranks, got world {self.worlds}"),
            (self.hosts and "intelmpi" in self.peers,
             "peers: intelmpi cannot run between hosts, because its wheel has no libfabric: leave it out"),
            (self.hosts and LIMIT in self.peers,
             "peers: the limit is that of one host's cores: leave out limit or --cluster"),
        ):  # fmt: skip
            if wrong:
                raise BenchError(what)

    def refusal(self) -> str:
        mpi.require(self.peers)
        return (self.hosts and hosts.why_not()) or ""

    @property
    def medium(self) -> str:
        return "apart" if self.hosts and self.hosts.ranks_per_host == 1 else "hosts"

    @contextlib.contextmanager
    def jobs(self, world: int) -> Iterator[Mapping[str, Any]]:
        names = [config.job for config in self.configs() if config.library != LIMIT]
        with contextlib.ExitStack() as stack:
            ranks = Jobs(names, world, self, stack.enter_context(Hosts(self.hosts)) if self.hosts else None)
            started: dict[str, Any] = dict(stack.enter_context(ranks))
            yield started | ({f"{LIMIT}/threads": machine_limit.Limit(self.limits)} if LIMIT in self.peers else {})

    def circumstances(self) -> dict[str, Any]:
        found: dict[str, Any] = {"limit": machine_limit.summary(self.limits)} if self.limits else {}
        if self.hosts:
            machines, used = congestion_controls()  # the machine's is that of the peers
            told = machines if used == machines else f"{machines}; of ringlet's connections {used}"
            found |= {"cluster": dataclasses.asdict(self.hosts), "congestion_control": told}
        return found


class MpiJob(jobs.Job):
    """Its ranks cannot remove their files under /dev/shm any more once they are killed."""

    _files: frozenset[Path] = frozenset()

    def await_ready(self, timeout_s: float) -> None:
        super().await_ready(timeout_s)
        self._note_files()

    def kill(self) -> None:
        self._note_files()
        super().kill()
        for file in self._files:
            file.unlink(missing_ok=True)

    def _note_files(self) -> None:
        self._files |= mpi.shared_files(self._pids.values())


class Jobs(jobs.Jobs):
    """hosts: to run on. A rank on another host than in the cluster is refused."""

    def __init__(self, names: Iterable[str], world: int, sweep: cases.Sweep, hosts: Hosts | None = None) -> None:
        super().__init__(names, world, sweep)
        self._hosts = hosts

    def __enter__(self) -> Any:
        started = super().__enter__()
        return {name: _Counted(job, self._hosts) for name, job in started.items()} if self._hosts else started

    def attach(self, connection: Any, hello: dict[str, Any]) -> None:
        if self._hosts:
            wanted = self._hosts.names[self._hosts.cluster.host_of(hello["rank"])]
            if hello["host"] != wanted:
                raise BenchError(f"{hello['job']}: rank {hello['rank']} runs on {hello['host']}, not on {wanted}")
        super().attach(connection, hello)

    def start(self, name: str, path: str) -> jobs.Job:
        library = name.partition("/")[0]
        if library not in MPI_PEERS:
            return super().start(name, path)
        # The peers' own Python imports ringlet's `ranks`, without ringlet or torch.
        env = {"RINGLET_BENCH_RANKS": str(Path(case.__file__).parent), "PYTHONPATH": ""}
        env |= self.environment() | mpi.environment(library, self.world, self._hosts)
        command = mpi.command(library, self.world, name, path, self._hosts)
        job = MpiJob(name, self.world, [command], env, self.folder)
        job.settings = mpi.describe(library, self.world, self._hosts)
        return job

    def commands(self, name: str, path: str) -> tuple[list[list[str]], dict[str, str]]:
        found, env = super().commands(name, path)
        if name.partition("/")[0] == STREAM:
            env["PYTHONPATH"] = f"{_ROOT}:{env['PYTHONPATH']}"
            ends = raw_tcp.ends(self._hosts)
            found = [[*line[:2], "benchmarks.peers.raw_tcp", *line[3:-2], *ends] for line in found]
        if self._hosts:
            env["GLOO_SOCKET_IFNAME"] = self._hosts.interface
            places = map(self._hosts.cluster.host_of, range(self.world))
            found = [self._hosts.command(host, line) for host, line in zip(places, found, strict=True)]
        return found, env


class _Counted:
    """A job on emulated hosts. Its answer to a measurement tells the bytes that crossed the busiest uplink in a call.
    The counters count all jobs, but jobs are measured in turns."""

    def __init__(self, job: jobs.Job, hosts: Hosts) -> None:
        self.version, self.settings = job.version, job.settings
        self._job, self._hosts = job, hosts

    def ask(self, command: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        before = self._hosts.traffic()
        answers = self._job.ask(command, timeout_s)
        if command["do"] == "prepare":
            self._case = case.Case(**command["case"])
        elif command["do"] == "measure":
            # One batch goes untimed before the samples.
            calls = command["batch"] * (command["samples"] + 1)
            crossed = round(uplinks.busiest_uplink(before, self._hosts.traffic()) / calls)
            uplinks.refuse_what_went_around(self._hosts.cluster, self._job.name.partition("/")[0], self._case, crossed)
            answers[0]["uplink_bytes"] = crossed
        return answers
