"""`ringlet run -n 4 prog.py`: starts a program's ranks on this host, shows their output, and ends them together."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch.distributed as dist

from ringlet import launch
from ringlet.cli import values

_READ_BYTES = 1 << 16


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="start the ranks of a program on this host",
        description="Start N processes of a Python program on this host, with torchrun's variables set (RANK, "
        "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Each line of output begins with its "
        "rank. If a rank fails, ringlet ends the others and exits with the code of that rank.",
    )
    parser.add_argument(
        "-n", "--nproc", "--world", "--worlds", type=values.world, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as after python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the program; the exit code of the rank that failed first, or 0. KeyboardInterrupt once all have ended."""
    program = ["-m", args.program] if args.module else [args.program]
    # Served here: no other process can take the port meanwhile, and no rank takes the store away when it ends.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with launch.termination_raises():
        ranks = _Ranks([sys.executable, *program, *args.arguments], args.nproc, store.port)
        try:
            ranks.start()
            failed = ranks.watch()
        except BaseException as error:
            ranks.interrupted = isinstance(error, KeyboardInterrupt)
            ranks.end(signal.SIGINT if ranks.interrupted else signal.SIGTERM)
            raise
    return 0 if failed is None else _told(failed, args.nproc)


def _told(failed: _Rank, world: int) -> int:
    code = failed.process.returncode
    how = f"exited with code {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
    others = "; the other ranks were ended" if world > 1 else ""
    print(f"ringlet run: rank {failed.rank} {how}{others}", file=sys.stderr)
    return code if code > 0 else 128 - code


def _signal_name(number: int) -> str:
    """SIGTERM. Of the real-time signals, only the first and the last have a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    exited: int
    """A descriptor that is readable when the process has ended."""


@dataclass
class _Output:
    """The output of one rank on one of its streams, line by line."""

    prefix: bytes
    to: BinaryIO
    rest: bytes = b""
    held: list[bytes] = field(default_factory=list)
    """A traceback, until its last line tells of what."""

    def take(self, data: bytes, interrupted: bool) -> None:
        """Passes whole lines on. If the job is interrupted, drops each rank's own KeyboardInterrupt traceback."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if self.held or (interrupted and line.startswith(b"Traceback (most recent call last):")):
                self.held.append(line)
                if len(self.held) > 1 and line[:1] not in (b" ", b""):
                    self._put([] if line.startswith(b"KeyboardInterrupt") else self.held)
                    self.held = []
            else:
                self._put([line])

    def end(self) -> None:
        self._put([*self.held, self.rest] if self.rest else self.held)
        self.rest, self.held = b"", []

    def _put(self, lines: list[bytes]) -> None:
        self.to.write(b"".join(self.prefix + line + b"\n" for line in lines))
        self.to.flush()


class _Ranks:
    """The processes of one job."""

    def __init__(self, command: list[str], world: int, port: int):
        self._command, self._world, self._port = command, world, port
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self.interrupted = False

    def start(self) -> None:
        for rank in range(self._world):
            # A single rank is in the terminal's hands. Of Ctrl-C several hear from this process, not from the terminal.
            alone = self._world == 1
            process = subprocess.Popen(
                self._command,
                env=self._environment(rank),
                stdin=None if alone else subprocess.DEVNULL,
                stdout=None if alone else subprocess.PIPE,
                stderr=None if alone else subprocess.PIPE,
                start_new_session=not alone,
                preexec_fn=functools.partial(launch.end_with_parent, os.getpid()),
            )
            one = _Rank(rank, process, os.pidfd_open(process.pid))
            self._ranks.append(one)
            self._selector.register(one.exited, selectors.EVENT_READ, one)
            for pipe, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    self._selector.register(pipe, selectors.EVENT_READ, _Output(b"[%d] " % rank, to.buffer))

    def _environment(self, rank: int) -> dict[str, str]:
        told: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._world,
            "LOCAL_WORLD_SIZE": self._world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_RUN_ID": f"ringlet run {os.getpid()} on {socket.gethostname()}",
        }
        defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self._world))}
        return {**defaults, **os.environ, **{name: str(value) for name, value in told.items()}}

    def watch(self) -> _Rank | None:
        """Waits until all ranks have ended well, or one has failed. Then ends the others and returns that rank."""
        failed: list[_Rank] = []
        while not failed and self._running():
            failed = [rank for rank in self._turn(None) if rank.process.returncode != 0]
        # Of several, the one that a signal ended: the others' failures follow from it.
        first = min(failed, key=lambda rank: rank.process.returncode, default=None)
        self.end(signal.SIGTERM)
        return first if first is None or first.process.returncode < 0 else failed[0]

    def end(self, number: int) -> None:
        """Ends the ranks that still run by that signal, and by SIGKILL if they take too long, or another comes here."""
        try:
            if not (self._world == 1 and self.interrupted):  # it has heard of it already
                self._signal(number)
            until = time.monotonic() + launch.GRACE_S
            while self._running() and time.monotonic() < until:
                self._turn(until - time.monotonic())
        finally:
            self._signal(signal.SIGKILL)
            for rank in self._running():
                rank.process.wait()
        self._drain()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.process.returncode is None]

    def _signal(self, number: int) -> None:
        for rank in self._running():
            with contextlib.suppress(ProcessLookupError):
                (os.kill if self._world == 1 else os.killpg)(rank.process.pid, number)

    def _turn(self, seconds: float | None) -> list[_Rank]:
        """Passes the ranks' output on. Returns the ranks that ended."""
        ended = []
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Output):
                self._read(key.fileobj, key.data)
            else:
                self._selector.unregister(key.fileobj)
                os.close(key.data.exited)
                key.data.process.wait()
                ended.append(key.data)
        return ended

    def _read(self, pipe: Any, output: _Output) -> bool:
        """Reads. Returns whether there was something."""
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            output.end()
            return False
        output.take(data, self.interrupted)
        return True

    def _drain(self) -> None:
        """Passes the ranks' last output on. (A child of a rank may keep a pipe open.)"""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Output):
                while self._read(key.fileobj, key.data):
                    pass
                key.data.end()
