"""The processes of one library: starts them once, tells them what to measure, and stops or kills them.

Ranks connect to a unix socket in a private folder and then wait for a command. A job is all ranks of a library in one
world. benchmarks/sweep.py starts those of more libraries, on emulated hosts too.
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
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlet.errors import Error

if TYPE_CHECKING:
    from .cases import Sweep

_STOP_S = 10.0


class BenchError(Error):
    """A sweep that cannot run, or a rank that died in one; the message says which and what to do."""


class Job:
    """One library's ranks. Not thread-safe; killed by `Jobs`. settings: what it is given beyond its defaults."""

    settings = ""

    def __init__(self, name: str, world: int, commands: list[list[str]], env: Mapping[str, str], folder: Path) -> None:
        self.name, self.world, self.version = name, world, ""
        self._folder, self._log = folder, folder / (name.replace("/", "-") + ".log")
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        with open(self._log, "wb") as log:
            self._processes = [
                subprocess.Popen(
                    command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
                for command in commands
            ]  # fmt: skip

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
        self.version = self._answers(timeout_s, "start")[0]["version"]

    def ask(self, command: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Give all ranks a command, return their answers in rank order."""
        line = json.dumps(command).encode()
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(line)
            except OSError as error:
                raise self._died(f"rank {rank} is gone ({error})") from error
        return self._answers(timeout_s, command["do"])

    def stop(self) -> None:
        """Ends the processes in order. `kill` ends those that do not stop."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(b'{"do": "stop"}')
        _await(self._processes, _STOP_S)

    def kill(self) -> None:
        """Ends the rest: first a launcher, in order, so that it removes its files, then everything."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        _await(running, _STOP_S / 5)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank, connection in self._connections.items():
            connection.close()
            # Open MPI puts ranks in process groups of their own. The folder's name tells ours from a reused pid.
            with contextlib.suppress(OSError):
                if os.fsencode(self._folder) in Path(f"/proc/{self._pids[rank]}/cmdline").read_bytes():
                    os.kill(self._pids[rank], signal.SIGKILL)

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


def _await(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits at most so long, in all, until they have ended."""
    until = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


class Jobs:
    """All libraries of one world, as a context: whatever happens inside, no process outlives it."""

    def __init__(self, names: Iterable[str], world: int, sweep: Sweep) -> None:
        self._names, self.world, self.sweep = list(dict.fromkeys(names)), world, sweep
        self._jobs: dict[str, Job] = {}

    def __enter__(self) -> dict[str, Job]:
        self.folder = Path(tempfile.mkdtemp(prefix="ringlet-bench-"))
        try:
            path = self.folder / "socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(self.world * len(self._names))
                for name in self._names:
                    self._jobs[name] = self.start(name, str(path))
                self._accept(listener)
            for job in self._jobs.values():
                job.await_ready(self.sweep.timeout_s)
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
        until = time.monotonic() + self.sweep.timeout_s
        listener.settimeout(0.2)
        while waiting := [job for job in self._jobs.values() if not job.attached]:
            for job in waiting:
                job.check_alive()
            if time.monotonic() > until:
                raise BenchError(f"{waiting[0].name}: its ranks did not start within {self.sweep.timeout_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                connected, _ = listener.accept()
                connected.setblocking(True)
                connection = Connection(connected.detach())
                with contextlib.suppress(EOFError, ConnectionError):  # it has ended
                    if connection.poll(self.sweep.timeout_s):
                        hello = json.loads(connection.recv_bytes())
                        self.attach(connection, hello)

    def attach(self, connection: Connection, hello: dict[str, Any]) -> None:
        """A rank has come. hello: its job, rank, host and process."""
        self._jobs[hello["job"]].attach(connection, hello)

    def start(self, name: str, path: str) -> Job:
        """A job with its processes. path: of the socket."""
        commands, env = self.commands(name, path)
        return Job(name, self.world, commands, env, self.folder)

    def commands(self, name: str, path: str) -> tuple[list[list[str]], dict[str, str]]:
        """The commands that start a job's ranks, and the variables they get."""
        places = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        env = {**self.environment(), **self.sweep.environment(), "PYTHONPATH": os.pathsep.join(filter(None, places))}
        if self.sweep.transport:  # of groups made through torch.distributed; ringlet.init takes it as an argument
            env["RINGLET_TRANSPORT"] = self.sweep.transport
        store = str(self.folder / (name.replace("/", "-") + ".store"))
        # python -m warns of a module that the package imports, too
        program = "import sys; from ringlet.bench.ranks.torch_ranks import main; main(sys.argv[1:])"
        start = [sys.executable, "-c", program, name]
        last = [path, store, self.sweep.transport, self.sweep.device]
        return [[*start, str(rank), str(self.world), *last] for rank in range(self.world)], env

    def environment(self) -> dict[str, str]:
        """One thread a rank, as torchrun sets; files that a killed rank leaves go with the folder."""
        return {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}

    def _kill(self) -> None:
        for job in self._jobs.values():
            job.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
