"""`ringlet run -n 4 prog.py`: starts a program's ranks on this host, shows their output, and ends them together."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from ringlet import interruptible, launch, leaving
from ringlet.cli import values
from ringlet.cli.parser import add_option
from ringlet.errors import ResourceError
from ringlet.store import check_route

_READ_BYTES = 1 << 16
_UNFINISHED_S = 0.1
"""How long the begin of a line waits for its end, before it is shown."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="start the ranks of a program on this host",
        description="Start N processes of a Python program on this host, with torchrun's variables set (RANK, "
        "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Each line of output begins with its "
        "rank. If a rank fails, ringlet ends the others and exits with the code of that rank.",
    )
    add_option(parser.add_mutually_exclusive_group(required=True), "--world", type=values.world, metavar="N",
        help="also -n: number of ranks")  # fmt: skip
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as after python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the program; the exit code of the rank that failed first, or 0. KeyboardInterrupt once all have ended."""
    program = ["-m", args.program] if args.module else [args.program]
    store = _store()
    with launch.termination_raises(), tempfile.TemporaryDirectory(prefix="ringlet-run-") as notes:
        ranks = _Ranks([sys.executable, *program, *args.arguments], args.world, store.port, Path(notes))
        with ranks.signals():
            try:
                ranks.start()
                failed = ranks.watch()
            except BaseException as error:
                ranks.interrupted = isinstance(error, KeyboardInterrupt)
                ranks.end(signal.SIGINT if ranks.interrupted else signal.SIGTERM)
                raise
    return 0 if failed is None else _told(failed, args.world)


def _store() -> dist.TCPStore:
    """Served here: no other process can take the port meanwhile, and no rank takes the store away when it ends."""
    try:
        check_route("127.0.0.1", 1)
    except OSError as error:
        raise ResourceError(
            f"the ranks cannot meet at 127.0.0.1 ({error.strerror}): bring the loopback interface up "
            "(ip link set lo up)"
        ) from error
    return interruptible.call(lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))


def _told(failed: _Rank, world: int) -> int:
    code = failed.code or 0
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
    """code: None while it runs; minus the number of the signal that ended it. Its process is not reaped until the job
    ends, so that no other process gets the number of its process group."""

    rank: int
    process: subprocess.Popen[bytes]
    note: Path
    code: int | None = None
    ended: float = 0.0

    def look(self) -> None:
        """At whether it has ended."""
        told = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if told is not None:
            self.code = told.si_status if told.si_code == os.CLD_EXITED else -told.si_status
            self.ended = time.monotonic()

    def failed(self) -> tuple[bool, bool, float]:
        """Of ranks that failed, the least caused the others: not one that lost a peer, rather one that a signal ended,
        and the one that began to leave first."""
        told = leaving.read(self.note)
        if told is None:
            return False, (self.code or 0) >= 0, self.ended
        return told[1], True, told[0]


@dataclass
class _Screen:
    """A stream of this process. line: whose line is not at its end; bar: whether that line is written over itself."""

    to: BinaryIO
    line: _Output | None = None
    bar: bool = False


@dataclass
class _Output:
    """The output of one rank on one of its streams, line by line."""

    prefix: bytes
    screen: _Screen
    rest: bytearray = field(default_factory=bytearray)
    since: float = 0.0
    """When the last of `rest` came."""
    returned: bool = False
    """The last that was shown is a carriage return."""
    held: list[bytes] = field(default_factory=list)
    """A traceback, until its last line tells of what."""

    def take(self, data: bytes, interrupted: bool) -> None:
        """Passes whole lines on, and at once what a carriage return begins or ends: a progress bar. If the job is
        interrupted, drops each rank's own KeyboardInterrupt traceback."""
        self.rest += data
        self.since = time.monotonic()
        if b"\n" in data:
            *lines, rest = bytes(self.rest).split(b"\n")
            self.rest = bytearray(rest)
            for line in lines:
                self._take_line(line + b"\n", interrupted)
        if b"\r" in data and b"\r" in self.rest:
            self.show_unfinished(interrupted)
        self.screen.to.flush()

    def _take_line(self, line: bytes, interrupted: bool) -> None:
        if not self.held and not (interrupted and line.startswith(b"Traceback (most recent call last):")):
            self._show(line)
            return
        self.held.append(line)
        if len(self.held) > 1 and line[:1] not in (b" ", b"\n"):
            for each in [] if line.startswith(b"KeyboardInterrupt") else self.held:
                self._show(each)
            self.held = []

    def show_unfinished(self, interrupted: bool) -> None:
        if self.rest and not interrupted:
            self._show(bytes(self.rest))
            self.rest.clear()
            self.screen.to.flush()

    def end(self) -> None:
        for line in self.held:
            self._show(line)
        if self.rest or self.screen.line is self:
            self._show(bytes(self.rest) + b"\n")
        self.rest.clear()
        self.held = []
        self.screen.to.flush()

    def _show(self, piece: bytes) -> None:
        """A line, or a part of one. After another rank's unfinished line it begins a new one; bars share a line."""
        screen, returns = self.screen, piece.startswith(b"\r")
        begins = screen.line is not self or self.returned
        if screen.line not in (None, self) and not (screen.bar and returns):
            screen.to.write(b"\n")
        text = re.sub(rb"\r(?=[^\r\n])", b"\r" + self.prefix, piece) if b"\r" in piece else piece
        screen.to.write(self.prefix + text if begins and not returns else text)
        self.returned, screen.bar = piece.endswith(b"\r"), b"\r" in piece
        screen.line = None if piece.endswith(b"\n") else self


class _Ranks:
    """The processes of one job."""

    def __init__(self, command: list[str], world: int, port: int, notes: Path):
        self._command, self._world, self._port, self._notes = command, world, port, notes
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self.interrupted = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, a child's end wakes `_turn`, and Ctrl-Z stops the ranks, which are not in the terminal's hands."""
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            there.setblocking(False)
            self._selector.register(here, selectors.EVENT_READ, None)
            handlers = {signal.SIGCHLD: lambda number, frame: None, signal.SIGCONT: self._go_on}
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                handlers[signal.SIGTSTP] = self._stop
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            wakeup = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        self._signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self, number: int, frame: Any) -> None:
        self._signal(signal.SIGCONT)

    def start(self) -> None:
        screens = _Screen(sys.stdout.buffer), _Screen(sys.stderr.buffer)
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
            self._ranks.append(_Rank(rank, process, self._note(rank)))
            for pipe, screen in zip((process.stdout, process.stderr), screens, strict=True):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    self._selector.register(pipe, selectors.EVENT_READ, _Output(b"[%d] " % rank, screen))

    def _note(self, rank: int) -> Path:
        return self._notes / str(rank)

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
            **leaving.environment(self._note(rank)),
        }
        defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self._world))}
        return {**defaults, **os.environ, **{name: str(value) for name, value in told.items()}}

    def watch(self) -> _Rank | None:
        """Waits until all ranks have ended well, or one has failed. Then ends the others and returns the first to fail.

        A rank that fails may take longer to end than the ranks that lost it: they do not end before it, within limits.
        """
        while self._running() and not self._first():
            self._turn(None)
        until = time.monotonic() + launch.GRACE_S
        while self._awaits_cause() and time.monotonic() < until:
            self._turn(until - time.monotonic())
        first = self._first()
        if first is None:
            self._drain()
        else:
            self.end(signal.SIGTERM)
        return first

    def _first(self) -> _Rank | None:
        return min((rank for rank in self._ranks if rank.code), key=_Rank.failed, default=None)

    def _awaits_cause(self) -> bool:
        """Whether a rank still runs that may have failed before those that have ended."""
        first = self._first()
        if first is None:
            return False
        lost_peer, _, when = first.failed()
        notes = [leaving.read(rank.note) for rank in self._running()]
        return bool(notes) if lost_peer else any(note is not None and note[0] < when for note in notes)

    def end(self, number: int) -> None:
        """Ends the ranks that still run by that signal, and by SIGKILL if they take too long, or another comes here.
        Then kills the processes that ranks have started and left."""
        try:
            if not (self._world == 1 and self.interrupted):  # it has heard of it already
                self._signal(number)
            until = time.monotonic() + launch.GRACE_S
            while self._running() and time.monotonic() < until:
                self._turn(until - time.monotonic())
        finally:
            for rank in self._ranks if self._world > 1 else self._running():
                self._send(rank, signal.SIGKILL)
            for rank in self._ranks:
                rank.process.wait()
        self._drain()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _signal(self, number: int) -> None:
        for rank in self._running():
            self._send(rank, number)

    def _send(self, rank: _Rank, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS and gVisor refuse a group of zombies
            (os.kill if self._world == 1 else os.killpg)(rank.process.pid, number)

    def _turn(self, seconds: float | None) -> None:
        """Passes the ranks' output on, and notes which have ended."""
        outputs = [key.data for key in self._selector.get_map().values() if key.data is not None]
        if any(output.rest for output in outputs):
            seconds = _UNFINISHED_S if seconds is None else min(seconds, _UNFINISHED_S)
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    key.fileobj.recv(_READ_BYTES)  # type: ignore[union-attr]
            else:
                self._read(key.fileobj, key.data)
        for output in outputs:
            if output.rest and time.monotonic() - output.since >= _UNFINISHED_S:
                output.show_unfinished(self.interrupted)
        for rank in self._running():
            rank.look()

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
