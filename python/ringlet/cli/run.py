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

from ringlet import interruptible, leaving
from ringlet.cli import options
from ringlet.errors import InvalidUsage, ResourceError
from ringlet.log import ranges
from ringlet.store import check_route
from ringlet.supervisor import End, RankProcesses, end_with_parent, signal_name, termination_raises

_READ_BYTES = 1 << 16
_UNFINISHED_S = 0.1  # how long the begin of a line waits for its end, before it is shown
_BEGINS = re.compile(rb"(?<=\n)(?!\Z)|(?<=\r)(?=[^\r\n])")  # where a line begins, or is written anew
_INTERRUPTED = re.compile(rb"Traceback \(most recent call last\):\n(?: .*\n|\n)*KeyboardInterrupt.*\n?")


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "run", run,
        help="start the ranks of a program on this host",
        description="Start N processes of a Python program on this host, with torchrun's variables set (RANK, "
        "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Each line of output begins with its "
        "rank. If a rank fails, ringlet ends the others and exits with the code of that rank.",
        examples="ringlet run -n 4 train.py --epochs 2\nringlet run -n 2 -m package.train",
    )  # fmt: skip
    options.add(parser, "world", help="also -n: number of ranks; must be given")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as after python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")


def run(args: argparse.Namespace) -> int:
    """Runs the program; the exit code of the rank that failed first, or 0. KeyboardInterrupt once all have ended."""
    program = ["-m", args.program] if args.module else [args.program]
    if args.world is None:
        raise InvalidUsage(f"give the number of ranks before the program: ringlet run -n 2 {' '.join(program)}")
    store = _store()
    with termination_raises(), tempfile.TemporaryDirectory(prefix="ringlet-run-") as notes:
        ranks = _Ranks([sys.executable, *program, *args.arguments], args.world, store.port, Path(notes))
        with ranks.signals():
            try:
                ranks.start()
                failed = ranks.watch()
                before = [] if failed is None else ranks.ended_well_before(failed)  # while the notes are there
            except BaseException as error:
                ranks.interrupted = isinstance(error, KeyboardInterrupt)
                ranks.end(signal.SIGINT if ranks.interrupted else signal.SIGTERM)
                raise
            finally:
                ranks.drain()
    if failed is None:
        return 0
    return _tell_failure(failed, ranks.ends[failed].code, args.world, before)


def _store() -> dist.TCPStore:
    """Served here: no other process can take the port meanwhile, and no rank takes the store away when it ends."""
    try:
        check_route("127.0.0.1", 1)
    except OSError as error:
        raise ResourceError(
            f"the ranks cannot meet at 127.0.0.1 ({error.strerror}): bring the loopback interface up "
            "(ip link set lo up)"
        ) from error
    try:
        return interruptible.call(lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        raise ResourceError(f"cannot serve the ranks' store: {reason}; is there a limit (ulimit -n)?") from error


def _tell_failure(rank: int, code: int, world: int, before: list[int]) -> int:
    """`before`: ranks that it may have lost because they ended too early."""
    how = f"exited with code {code}" if code > 0 else f"was ended by {signal_name(-code)}"
    others = "; the other ranks were ended" if world > 1 else ""
    early = f"; rank {ranges(before)} had ended before it, with code 0" if before else ""
    print(f"ringlet run: rank {rank} {how}{early}{others}", file=sys.stderr)
    return code if code > 0 else 128 - code


@dataclass
class _Screen:
    """A stream of this process. line: whose line is not at its end; bar: whether that line is written over itself."""

    to: BinaryIO
    line: _Output | None = None
    bar: bool = False


@dataclass
class _Output:
    """The output of one rank on one of its streams. rest: what waits for the end of its line; since: when it came."""

    prefix: bytes
    screen: _Screen
    rest: bytearray = field(default_factory=bytearray)
    since: float = 0.0
    returned: bool = False  # the last that was shown is a carriage return

    def take(self, data: bytes, hold: bool) -> None:
        """Passes whole lines on, and at once what a carriage return begins or ends: a progress bar. hold: nothing."""
        ready = len(data) if b"\r" in data else data.rfind(b"\n") + 1
        before = len(self.rest)
        self.rest += data
        self.since = time.monotonic()
        if ready and not hold:
            self.show(before + ready)

    def show(self, end: int | None = None) -> None:
        """What waits, up to `end`. After another rank's unfinished line it begins a new one; bars share a line."""
        piece = bytes(self.rest[:end])
        del self.rest[:end]
        screen = self.screen
        if piece:
            if screen.line not in (None, self) and not (screen.bar and piece.startswith(b"\r")):
                screen.to.write(b"\n")
            if (screen.line is not self or self.returned) and not piece.startswith(b"\r"):
                screen.to.write(self.prefix)
            screen.to.write(_BEGINS.sub(self.prefix, piece))
            self.returned, screen.bar = piece.endswith(b"\r"), b"\r" in piece[piece.rfind(b"\n") + 1 :]
            screen.line = None if piece.endswith(b"\n") else self
        screen.to.flush()

    def end(self, interrupted: bool) -> None:
        if interrupted:
            self.rest[:] = _INTERRUPTED.sub(b"", bytes(self.rest))
        if not self.rest.endswith(b"\n") and (self.rest or self.screen.line is self):
            self.rest += b"\n"
        self.show()


class _Ranks(RankProcesses):
    """The processes of one job. They are not reaped until it ends, so that no other process gets the number of their
    process groups."""

    def __init__(self, command: list[str], world: int, port: int, notes: Path):
        super().__init__()
        self._command, self._world, self._port, self._notes = command, world, port, notes
        self._selector = selectors.DefaultSelector()
        self.interrupted = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, a child's end wakes `turn`, and Ctrl-Z stops the ranks, which are not in the terminal's hands."""
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
        self._send_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self, number: int, frame: Any) -> None:
        self._send_all(signal.SIGCONT)

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
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
            self.processes.append(process)
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

    def left(self, rank: int) -> tuple[float, bool] | None:
        return leaving.read(self._note(rank))

    def send(self, rank: int, number: int) -> None:
        alone = self._world == 1
        if alone and number == signal.SIGINT:  # it has heard of it already
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS and gVisor refuse a group of zombies
            (os.kill if alone else os.killpg)(self.processes[rank].pid, number)

    def kill(self) -> None:
        """Also kills the processes that ranks have started and left."""
        for rank in range(len(self.processes)) if self._world > 1 else self.running():
            self.send(rank, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _send_all(self, number: int) -> None:
        for rank in self.running():
            self.send(rank, number)

    def turn(self, seconds: float | None) -> None:
        """Passes the ranks' output on, too."""
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
            if output.rest and not self._holds(output) and time.monotonic() - output.since >= _UNFINISHED_S:
                output.show()
        for rank in self.running():
            ended = os.waitid(os.P_PID, self.processes[rank].pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self.ends[rank] = End(code, time.monotonic())

    def _read(self, pipe: Any, output: _Output) -> bool:
        """Reads. Returns whether there was something."""
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            output.end(self.interrupted)
            return False
        output.take(data, self._holds(output))
        return True

    def _holds(self, output: _Output) -> bool:
        """Errors of ranks that Ctrl-C ends, until it is known which are their own KeyboardInterrupt."""
        return self.interrupted and output.screen.to is sys.stderr.buffer

    def drain(self) -> None:
        """Passes on the last output of ranks that have ended, and reaps them. (A child of one may keep a pipe open.)"""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Output):
                while self._read(key.fileobj, key.data):
                    pass
                key.data.end(self.interrupted)
        for process in self.processes:
            process.poll()
