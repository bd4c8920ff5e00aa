"""The processes of one library: starts them once, tells them what to measure, and stops or kills them.

Ranks connect to a unix socket in a private folder and then wait for a command. A job is all ranks of a library in one
world. The benchmark starts ringlet, gloo and the plain stream rank by rank, an MPI library through its own mpiexec. On
emulated hosts all hosts share the folder. If a rank is on another host than in the cluster, it is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import repository
from .cases import MPI_PEERS, STREAM
from .exceptions import BenchError

_STOP_S = 10.0
_RANKS = Path(__file__).parent / "ranks"


class Job:
    """One library's ranks. Not thread-safe; killed by `Jobs`."""

    def __init__(self, name: str, world: int, commands: list[list[str]], env: dict[str, str], folder: Path) -> None:
        self.name, self.world = name, world
        self.version = self.transport = ""
        self._folder, self._log = folder, folder / (name.replace("/", "-") + ".log")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._shared_files: set[Path] = set()
        self.hosts: Any = None  # as in Jobs
        with open(self._log, "wb") as log:
            for command in commands:
                self._processes.append(
                    subprocess.Popen(
                        command, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )
                )  # fmt: skip

    def attach(self, connection: Connection, hello: dict[str, Any]) -> None:
        self._connections[hello["rank"]], self._pids[hello["rank"]] = connection, hello["pid"]

    @property
    def attached(self) -> bool:
        return len(self._connections) == self.world

    def check_alive(self) -> None:
        """Raise if a process ended while others still wait for it."""
        for process in self._processes:
            if process.poll() is not None:
                raise self._died(f"ended with status {process.returncode} before its ranks were ready")

    def await_ready(self, timeout_s: float) -> None:
        ready = self._answers(timeout_s, "start")
        self.version, self.transport = ready[0]["version"], ready[0]["transport"]
        self._note_shared_files()

    def ask(self, command: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Give all ranks a command, return their answers in rank order."""
        line = json.dumps(command).encode()
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(line)
            except OSError as error:
                raise self._died(f"rank {rank} is gone ({error})") from error
        return self._answers(timeout_s, command["do"])

    def traffic(self) -> list[Any]:
        """The uplinks' counters. They count all jobs, but jobs are measured in turns. None without emulated hosts."""
        return self.hosts.traffic() if self.hosts else []

    def stop(self) -> None:
        """Ends the processes in order. `kill` ends those that do not stop."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(b'{"do": "stop"}')
        until = time.monotonic() + _STOP_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def kill(self) -> None:
        """Ends the rest: first mpiexec, in order, so that it removes its files, then everything."""
        running = [process for process in self._processes if process.poll() is None]
        self._note_shared_files()
        for process in running:
            process.terminate()
        until = time.monotonic() + _STOP_S / 5
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank, connection in self._connections.items():
            connection.close()
            # Open MPI puts ranks in process groups of their own. The folder's name tells ours from a reused pid.
            with contextlib.suppress(OSError):
                if os.fsencode(self._folder) in Path(f"/proc/{self._pids[rank]}/cmdline").read_bytes():
                    os.kill(self._pids[rank], signal.SIGKILL)
        for file in self._shared_files:
            file.unlink(missing_ok=True)

    def _note_shared_files(self) -> None:
        """Of an MPI library, which cannot remove them any more once it is killed."""
        if self.name.partition("/")[0] in MPI_PEERS:
            self._shared_files |= repository.module("peers.mpi").shared_files(self._pids.values())

    def _answers(self, timeout_s: float, doing: str) -> list[dict[str, Any]]:
        until, answers = time.monotonic() + timeout_s, {}
        waiting = {connection: rank for rank, connection in self._connections.items()}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                silent = sorted(waiting.values())
                raise self._died(f"{doing}: no answer from ranks {silent} after {timeout_s:.0f} s (--timeout)")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = answer = json.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._died(f"rank {rank} died during {doing}") from None
                if "error" in answer:
                    told = f"rank {rank} failed during {doing}: {answer['error']}"
                    raise self._died("\n".join(filter(None, (told, answer["traceback"]))))
        return [answers[rank] for rank in range(self.world)]

    def _died(self, what: str) -> BenchError:
        said = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        return BenchError(f"{self.name}, {self.world} ranks: {what}" + "".join(f"\n  | {line}" for line in said))


class Jobs:
    """All libraries of one world, as a context: whatever happens inside, no process outlives it.

    hosts: a `Hosts` of benchmarks/hosts.py; None: this machine. transport, device, gpu_heap_mib: as in `Sweep`.
    """

    def __init__(
        self,
        names: Iterable[str],
        world: int,
        timeout_s: float,
        *,
        hosts: Any = None,
        transport: str = "",
        device: str = "cpu",
        gpu_heap_mib: int = 0,
    ) -> None:
        self._names, self._world, self._timeout_s = list(dict.fromkeys(names)), world, timeout_s
        self._hosts, self._transport, self._device, self._gpu_heap_mib = hosts, transport, device, gpu_heap_mib
        self._jobs: dict[str, Job] = {}

    def __enter__(self) -> dict[str, Job]:
        self._folder = Path(tempfile.mkdtemp(prefix="ringlet-bench-"))
        try:
            path = self._folder / "socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(self._world * len(self._names))
                for name in self._names:
                    commands, env = self._commands(name)
                    self._jobs[name] = Job(name, self._world, commands, env, self._folder)
                    self._jobs[name].hosts = self._hosts
                self._accept(listener)
            for job in self._jobs.values():
                job.await_ready(self._timeout_s)
        except BaseException:
            self._kill()
            raise
        return self._jobs

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None:
            for job in self._jobs.values():
                job.stop()
        self._kill()

    def _accept(self, listener: socket.socket) -> None:
        until = time.monotonic() + self._timeout_s
        listener.settimeout(0.2)
        while waiting := [job for job in self._jobs.values() if not job.attached]:
            for job in waiting:
                job.check_alive()
            if time.monotonic() > until:
                raise BenchError(f"{waiting[0].name}: its ranks did not start within {self._timeout_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                connected, _ = listener.accept()
                connected.setblocking(True)
                connection = Connection(connected.detach())
                with contextlib.suppress(EOFError, ConnectionError):  # it has ended
                    if connection.poll(self._timeout_s):
                        hello = json.loads(connection.recv_bytes())
                        self._check_place(hello)
                        self._jobs[hello["job"]].attach(connection, hello)

    def _check_place(self, hello: dict[str, Any]) -> None:
        if self._hosts:
            wanted = self._hosts.names[self._hosts.cluster.host_of(hello["rank"])]
            if hello["host"] != wanted:
                raise BenchError(f"{hello['job']}: rank {hello['rank']} runs on {hello['host']}, not on {wanted}")

    def _commands(self, name: str) -> tuple[list[list[str]], dict[str, str]]:
        """The commands that start a job's ranks, and the variables they get."""
        library, socket_path = name.partition("/")[0], str(self._folder / "socket")
        # One thread a rank, as torchrun sets; files that a killed MPI leaves go with the folder.
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}
        if library in MPI_PEERS:
            # This package's `ranks`, which the peers' own Python imports without ringlet or torch.
            env |= {"RINGLET_BENCH_RANKS": str(_RANKS), "PYTHONPATH": ""}
            mpi = repository.module("peers.mpi")
            env |= mpi.environment(library, self._world, self._hosts)
            return [mpi.command(library, self._world, name, socket_path, self._hosts)], env
        package_root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
        if self._hosts:
            env["GLOO_SOCKET_IFNAME"] = self._hosts.interface
        if self._transport:  # of groups made through torch.distributed; ringlet.init takes it as an argument
            env["RINGLET_TRANSPORT"] = self._transport
        if self._gpu_heap_mib and "RINGLET_GPU_HEAP_MIB" not in os.environ:
            env["RINGLET_GPU_HEAP_MIB"] = str(self._gpu_heap_mib)
        store = str(self._folder / (name.replace("/", "-") + ".store"))
        module, last = "ringlet.bench.ranks.torch_ranks", [self._transport, self._device]
        if library == STREAM:
            module, last = "benchmarks.peers.raw_tcp", repository.module("peers.raw_tcp").ends(self._hosts)
            env["PYTHONPATH"] = os.pathsep.join((str(repository.root()), env["PYTHONPATH"]))
        start = [sys.executable, "-m", module, name]
        commands = [[*start, str(rank), str(self._world), socket_path, store, *last] for rank in range(self._world)]
        if self._hosts:
            places = map(self._hosts.cluster.host_of, range(self._world))
            commands = [self._hosts.command(host, line) for host, line in zip(places, commands, strict=True)]
        return commands, env

    def _kill(self) -> None:
        for job in self._jobs.values():
            job.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
