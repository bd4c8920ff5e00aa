"""How a part of the GPU check is run, and what is kept of it.

A part is some commands, one after the other, under one limit. Each is started in a session of its own; what all of them
print goes to LOGS/NAME.log, and what became of the part to LOGS/NAME.json. Nothing that a command does ends the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
GRACE = 8.0  # seconds from SIGTERM to SIGKILL: pytest prints its failures meanwhile
LEAST = 10.0  # seconds; with less left a part is not begun
ENDED = 124  # the status of a command that was ended at its limit, as timeout(1) has it
NOT_STARTED = 127


@dataclass(frozen=True)
class Record:
    """What became of a part. rc: the first exit status of its commands that is not 0, None while they run.

    note: where it did not come to its end by itself, why. when, commit, device: of the run that it is from.
    """

    rc: int | None = None
    seconds: float = 0.0
    note: str = ""
    when: str = ""
    commit: str = ""
    device: str = ""

    @property
    def passed(self) -> bool:
        return self.rc == 0 and not self.note

    @property
    def failed(self) -> bool:
        """Something was wrong; not only: there was no time for all of it."""
        return self.rc not in (0, None, ENDED)

    @property
    def outcome(self) -> str:
        wrong = f"failed: ended {told_status(self.rc or 0)}" if self.failed else ""
        return "; ".join(filter(None, [wrong, self.note])) or "passed"


class Logs:
    """The folder with the logs of all parts, of this run and of earlier ones on the same GPU; others' do not count."""

    def __init__(self, folder: Path, device: str = "") -> None:
        self.folder, self.device = folder, device

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def rows_file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def record(self, name: str) -> Record | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = Record(**json.loads((self.folder / f"{name}.json").read_text()))
            return record if record.device == self.device else None
        return None

    def keep(self, name: str, record: Record) -> None:
        fresh = self.folder / f".{name}.json.new"
        fresh.write_text(json.dumps(dataclasses.asdict(record)) + "\n")
        os.replace(fresh, self.folder / f"{name}.json")

    def text(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return self.log(name).read_text(errors="replace") if self.record(name) else ""
        return ""

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What `ringlet bench --json` wrote; of a run that was ended the last line may be half a line."""
        found = []
        with contextlib.suppress(OSError):
            for line in self.rows_file(name).read_text(errors="replace").splitlines() if self.record(name) else ():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found


class Running:
    """A part under way: its commands, its log, and the time that it has."""

    def __init__(self, log: Path, environment: dict[str, str], seconds: float, *, grace: float = GRACE) -> None:
        self.log, self.status, self.note = log, 0, ""
        self._environment, self._seconds, self._grace = environment, seconds, grace
        self._until = time.monotonic() + seconds

    def run(self, *command: str, leave: float = 0.0, beyond: float = 0.0) -> int:
        """The command's exit status. It may take what is left of the part's time but `leave` seconds for the commands
        after it, or `beyond` seconds whatever is left."""
        limit = beyond or self._until - time.monotonic() - leave
        with open(self.log, "ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            if limit <= 0:
                status, note = ENDED, f"ended at its limit of {self._seconds:.0f} s"
            else:
                status, note = self._execute(command, log, limit)
        if note or status:
            self.write(note or f"ended {told_status(status)}")
        self.status, self.note = self.status or status, self.note or note
        return status

    def write(self, line: str) -> None:
        """A line of the check's own in the log, whatever the command's last line lacks."""
        with open(self.log, "ab") as log:
            log.write(f"\n{line}\n".encode())

    def _execute(self, command: tuple[str, ...], log: IO[bytes], limit: float) -> tuple[int, str]:
        try:
            process = subprocess.Popen(
                command, env=self._environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.write(f"could not be started: {error}")
            return NOT_STARTED, ""
        grace = 0.0  # for what a command that ended by itself, or an interrupt of the check, leaves behind
        try:
            return process.wait(limit), ""
        except subprocess.TimeoutExpired:
            grace = self._grace
            return ENDED, f"ended at its limit of {limit:.0f} s"
        finally:
            end(process, grace)


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ends the command's process group, and those of its descendants that have left it, as the ranks of `ringlet bench`
    do: SIGTERM to the group if there is any grace, SIGKILL to all after it. The next command finds the GPU free."""
    with contextlib.ExitStack() as stack:
        below = descendants(process.pid)
        handles = [stack.enter_context(handle) for pid in below if (handle := Handle(pid)).is_open]
        if grace > 0:
            signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        signal_group(process.pid, signal.SIGKILL)
        for handle in handles:
            handle.kill()
        until = time.monotonic() + GRACE  # not for ever: what waits in the driver does not die
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        while time.monotonic() < until and any(
            pid in below or group == process.pid for pid, (_, group) in running_processes().items()
        ):
            time.sleep(0.02)


class Handle:
    """A process that may end meanwhile, and whose number may then be another's."""

    def __init__(self, pid: int) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.pidfd_open(pid)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)


def signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def running_processes() -> dict[int, tuple[int, int]]:
    """Every process that is no zombie, with its parent and its group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # PID (NAME) STATE PARENT GROUP ...; the name may hold anything.
            state, parent, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state not in "ZX":
                found[int(stat.parent.name)] = int(parent), int(group)
    return found


def descendants(pid: int) -> list[int]:
    """The processes that stand below this one now."""
    parents, found = running_processes(), [pid]
    for above in found:
        found += [child for child, (parent, _) in parents.items() if parent == above]
    return found[1:]


def told_status(status: int) -> str:
    if status >= 0:
        return f"with {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


@dataclass(frozen=True)
class Part:
    """A part of the check. act: runs its commands. lacks: what it cannot run without and is not there, or ""."""

    name: str
    seconds: float
    act: Callable[[Running], object]
    environment: dict[str, str]
    lacks: Callable[[], str] = lambda: ""

    def run(self, logs: Logs, limit: float, of_run: Record, *, grace: float = GRACE) -> Record:
        """`of_run`: when, commit and device of this run. The log and the record of an earlier run are replaced."""
        started = time.monotonic()
        logs.keep(self.name, dataclasses.replace(of_run, note="did not end: the check was ended first"))
        logs.log(self.name).write_bytes(b"")
        running = Running(logs.log(self.name), self.environment, limit, grace=grace)
        try:
            self.act(running)
        except Exception as error:
            running.status = running.status or NOT_STARTED
            running.write(f"could not be run: {type(error).__name__}: {error}")
        seconds = round(time.monotonic() - started, 1)
        record = dataclasses.replace(of_run, rc=running.status, seconds=seconds, note=running.note)
        logs.keep(self.name, record)
        return record


def say(*lines: str) -> None:
    """For who looks on; the check does not need them."""
    with contextlib.suppress(OSError):
        print(*lines, sep="\n", flush=True)


def carry_out(
    parts: list[Part], logs: Logs, of_run: Record, until: float, *, show: Callable[[dict[str, str]], None], grace: float
) -> dict[str, str]:
    """Runs parts in turn until `until`, on time.monotonic's clock, and shows what there is before the first and after
    each. Returns, and shows, which were not run and why."""
    not_run: dict[str, str] = {}
    show(not_run)
    for part in parts:
        left = until - time.monotonic()
        lack = part.lacks()
        try:
            if left < LEAST or lack:
                not_run[part.name] = "no time left" if left < LEAST else lack
                say(f"{part.name}: not run: {not_run[part.name]}")
            else:
                record = part.run(logs, min(part.seconds, left), of_run, grace=grace)
                say(f"{part.name}: {record.outcome}, {record.seconds} s")
        except OSError as error:  # of the logs' own files
            not_run[part.name] = str(error)
        except KeyboardInterrupt:
            rest = parts[parts.index(part) + 1 :]
            show(not_run | {later.name: "interrupted" for later in rest})
            raise
        show(not_run)
    return not_run
