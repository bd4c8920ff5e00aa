"""Signals in every kind of wait: Ctrl-C, a handler that does not raise, ranks as threads, spawn and `ringlet run`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringlet
import stalls
from programs import ended, need_namespace, until
from ranks import free_ports, joined, on
from refusals import refused
from ringlet import _C
from ringlet.cli.main import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The wait is to end within 0.1 s; the machine may be busy. Without it the wait ends at the group's timeout.
BOUND_S, TIMEOUT_S = 10.0, 60.0
PROCESSES = ("shared_memory", "tcp", "mixed")


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """What is inside waits, and ends by Ctrl-C soon after that."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = stalls.later(0.3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - sent[0] < BOUND_S
    timer.join()


# --- calls on one transport -----------------------------------------------------------------------------------------


def behind_an_asynchronous_call() -> None:
    work = ringlet.all_reduce(ones(), async_op=True)
    try:
        ringlet.all_reduce(ones(8))
    finally:
        with pytest.raises(ringlet.PeerLost, match="interrupted"):  # it is given up, and nothing of it goes on
            work.wait()


GIVEN_UP: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: ringlet.all_reduce(ones()),
    "large all_reduce": lambda: ringlet.all_reduce(ones(1 << 20)),
    "barrier": ringlet.barrier,
    "recv": lambda: ringlet.recv(ones(), 1),
    "send": lambda: ringlet.send(ones(16 << 20), 1),
    "behind an asynchronous call": behind_an_asynchronous_call,
}


COLLECTIVE = ("all_reduce", "large all_reduce", "barrier")


@on(3, "nothing")
@pytest.mark.parametrize("transport", PROCESSES)
def test_ctrl_c_ends_a_call_and_tells_the_peers(rank: int, world: int, transport: str, path: str) -> None:
    store = dist.FileStore(path, world)
    for name, wait in GIVEN_UP.items():
        with joined(rank, world, store, transport, timeout=TIMEOUT_S, name=name) as group:
            if rank == 0:
                with interrupted():
                    wait()
                with pytest.raises(ringlet.PeerLost, match=r"failed before: .*interrupted \(KeyboardInterrupt\)"):
                    ringlet.all_reduce(ones())
                store.set(f"{name} is over", "")
            elif rank == 1:
                store.wait([f"{name} is over"])
            with pytest.raises(ringlet.PeerLost) as caught:  # rank 2 waits all the time
                for _ in range(3):  # the interrupted rank may have done its part of the first
                    (wait if name in COLLECTIVE else GIVEN_UP["all_reduce"])()
            if rank > 0:
                assert "rank 0 reported: rank 0 of 3 in" in str(caught.value), caught.value
                assert caught.value.reported
                assert "interrupted (KeyboardInterrupt)" in str(caught.value), caught.value
            assert group.rank == rank


@on(2, "nothing")
@pytest.mark.parametrize("transport", PROCESSES)
def test_an_interrupted_wait_leaves_an_asynchronous_call_alone(
    rank: int, world: int, transport: str, path: str
) -> None:
    store = dist.FileStore(path, world)
    with joined(rank, world, store, transport, timeout=TIMEOUT_S):
        total, got = ones(), torch.zeros(4)
        if rank == 1:
            store.wait(["interrupted"])
        works = [ringlet.all_reduce(total, async_op=True)]
        works.append(ringlet.recv(got, 1, async_op=True) if rank == 0 else ringlet.send(ones(), 0, async_op=True))
        if rank == 0:
            for work in works:
                with interrupted():
                    work.wait()
                with interrupted():
                    work.wait(TIMEOUT_S)
            store.set("interrupted", "")
        for work in works:
            work.wait()
        assert total.eq(world).all() and got.eq(1 - rank).all()
        ringlet.barrier()


class Stop(Exception):
    """What another thread has this one raise."""


@on(2, "nothing")
def test_ctrl_c_cuts_leaving_short(rank: int, world: int, path: str) -> None:
    store = dist.FileStore(path, world)
    with joined(rank, world, store, "shared_memory", timeout=TIMEOUT_S) as group:
        if rank == 0:
            work = ringlet.all_reduce(ones(), async_op=True)
            with interrupted():
                group.close(timedelta(seconds=TIMEOUT_S))
            with pytest.raises(ringlet.PeerLost, match="closed the group while this call was pending"):
                work.wait()
            refused("closed", ringlet.barrier)
            store.set("left", "")
        else:
            store.wait(["left"])


# --- making groups --------------------------------------------------------------------------------------------------


@on(1, "nothing")
def test_ctrl_c_ends_the_wait_for_a_missing_rank(rank: int, world: int, path: str) -> None:
    store = dist.FileStore(path, 2)
    for number in range(2):  # rank 0 asks who is there, the others wait to be asked
        with interrupted():
            ringlet.init(number, 2, store, timeout=TIMEOUT_S)
    for transport in ("shared_memory", "tcp", "auto"):  # a rank that went after that
        with interrupted():
            _C.Group.join(store, f"gone/{transport}", 0, 2, timedelta(seconds=TIMEOUT_S), transport)
    with interrupted():
        ringlet.init(0, 2, transport="threads", timeout=TIMEOUT_S, name="interrupted")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)[0]))
    try:
        for number in range(2):  # which makes the store, or looks for it
            with interrupted():
                ringlet.init(number, 2, timeout=TIMEOUT_S)
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]  # the process stays for other tests
    refused("no group yet", ringlet.current)


# --- torch.distributed ----------------------------------------------------------------------------------------------


@on("two")
def test_ctrl_c_ends_waits_of_torch_distributed(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    work = dist.all_reduce(ones(), async_op=True) if rank == 0 else None
    if rank == 0:
        for wait in (
            lambda: work.wait(),
            lambda: work.wait(timedelta(seconds=TIMEOUT_S)),
            lambda: dist.recv(torch.zeros(4), 1),
            lambda: ringlet.monitored_barrier(timeout=TIMEOUT_S),
        ):
            with interrupted():
                wait()
        store.set("waited", "")
        work.wait()  # the group is well
    else:
        store.wait(["waited"])
        dist.all_reduce(ones())
        dist.send(ones(), 0)
    if rank == 0:
        with interrupted():
            dist.all_reduce(ones())
        store.set("called", "")
    else:
        store.wait(["called"])


# --- ranks that are threads -----------------------------------------------------------------------------------------


def waits_by_rank(rank: int, folder: str) -> None:
    """Of four ranks each waits for something else, and the last only computes."""
    pathlib.Path(folder, f"{rank} waits").touch()
    if rank == 0:
        ringlet.all_reduce(ones())
    elif rank == 1:
        ringlet.recv(ones(), 3)
    elif rank == 2:
        ringlet.all_reduce(ones(), async_op=True).wait()
    else:
        while True:
            time.sleep(0.01)


def interrupt_when(ready: Callable[[], bool], number: int = signal.SIGINT, pid: int = 0) -> threading.Thread:
    def run() -> None:
        while not ready():
            time.sleep(0.01)
        time.sleep(0.2)  # they wait now, or soon
        os.kill(pid or os.getpid(), number)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def all_wait(folder: pathlib.Path, world: int) -> Callable[[], bool]:
    return lambda: len(list(folder.glob("* waits"))) == world


def test_ctrl_c_ends_ranks_that_are_threads(tmp_path):
    thread = interrupt_when(all_wait(tmp_path, 4))
    with pytest.raises(KeyboardInterrupt):
        ringlet.spawn(waits_by_rank, 4, (str(tmp_path),), transport="threads", timeout=TIMEOUT_S)
    thread.join()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("rank ")]


@on(2, "threads", "shared_memory")
def test_an_asynchronous_exception_ends_the_wait_of_its_thread(rank: int, world: int) -> None:
    """PyThreadState_SetAsyncExc reaches a thread that waits."""
    if rank == 1:
        with pytest.raises(ringlet.PeerLost, match=r"rank 0 reported: .*interrupted \(Stop\)"):
            ringlet.recv(ones(), 0)
        return
    target = ctypes.c_ulong(threading.get_ident())
    stalls.later(0.2, ctypes.pythonapi.PyThreadState_SetAsyncExc, target, ctypes.py_object(Stop))
    with pytest.raises(Stop):
        ringlet.all_reduce(ones())


# --- spawn ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def note_process(rank: int, folder: str, stubborn: bool) -> None:
    """One rank that waits for the other, which waits in Python; or ignores Ctrl-C."""
    pathlib.Path(folder, f"{rank} pid").write_text(str(os.getpid()))
    if stubborn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pathlib.Path(folder, f"{rank} waits").touch()
        if rank == 0:
            ringlet.recv(ones(), 1)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        pathlib.Path(folder, f"{rank} interrupted").touch()
        raise


def state(pid: str) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "gone"


def gone(files: Iterable[pathlib.Path]) -> bool:
    """The processes whose numbers are in the files. A zombie that nobody reaps is gone too."""
    return all(state(file.read_text()) in ("gone", "Z") for file in files)


@pytest.mark.parametrize("stubborn", (False, True))
def test_ctrl_c_ends_spawned_ranks(tmp_path, temporary, capfd, stubborn):
    thread = interrupt_when(all_wait(tmp_path, 2))
    second = interrupt_when(lambda: stubborn and not thread.is_alive()) if stubborn else None
    with pytest.raises(KeyboardInterrupt):
        ringlet.spawn(note_process, 2, (str(tmp_path), stubborn), timeout=TIMEOUT_S)
    thread.join()
    if second is not None:
        second.join()
    assert gone(tmp_path.glob("* pid")) and not list(temporary.iterdir())
    assert len(list(tmp_path.glob("* interrupted"))) == (0 if stubborn else 2)
    assert "Traceback" not in capfd.readouterr().err


PARENT = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
sys.path[:0] = sys.argv[2:]
import ringlet, test_interrupts
if __name__ == "__main__":
    ringlet.spawn(test_interrupts.note_process, 2, (sys.argv[1], False), timeout=60)
"""


IN_A_FINALIZER = """
import os, signal, time
from ringlet.supervisor import termination_raises

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

with termination_raises():
    Finalized()
    time.sleep(30)
"""


def test_a_termination_in_a_finalizer_is_not_lost():
    done = ended(sys.executable, "-c", IN_A_FINALIZER)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
def test_spawned_ranks_end_with_their_parent(tmp_path, temporary, number):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    paths = (script, tmp_path, ROOT / "tests/core", ROOT / "tests/support", ROOT / "python")
    command = [sys.executable, *map(str, paths)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        thread = interrupt_when(all_wait(tmp_path, 2), number, parent.pid)
        _, said = parent.communicate(timeout=2 * TIMEOUT_S)
        thread.join()
    assert parent.returncode == -number, said
    until(lambda: gone(tmp_path.glob("* pid")), BOUND_S)
    assert not list(temporary.iterdir())
    assert "Traceback" not in said


# --- ringlet run ----------------------------------------------------------------------------------------------------

REPORT = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(*(os.environ[name] for name in names), *sys.argv[1:])
print("half a line", end="", file=sys.stderr)
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(60)
"""
WAIT = """
import pathlib, sys
sys.path[:0] = sys.argv[2:]
import torch, ringlet
group = ringlet.init()
assert ringlet.all_reduce(torch.ones(1)).item() == group.world
try:
    pathlib.Path(sys.argv[1], f"{group.rank} waits").touch()
    ringlet.recv(torch.ones(1), 1 - group.rank)
except KeyboardInterrupt:
    print("saved", flush=True)
    raise
"""


def words(tmp_path: pathlib.Path, program: str, *arguments: str, ranks: int = 2) -> list[str]:
    script = tmp_path / "program.py"
    script.write_text(program)
    return ["run", "-n", str(ranks), str(script), *arguments]


def run(tmp_path: pathlib.Path, program: str, *arguments: str, ranks: int = 2) -> int:
    return main(words(tmp_path, program, *arguments, ranks=ranks))


def started(tmp_path: pathlib.Path, program: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The same in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "ringlet", *words(tmp_path, program, *arguments)], **options)


def test_run_tells_ranks_who_they_are(tmp_path, capfd):
    assert run(tmp_path, REPORT, "--a", "b", "-n", "3") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} 2 {rank} 2 127.0.0.1 --a b -n 3" for rank in range(2)]
    assert sorted(err.splitlines()) == ["[0] half a line", "[1] half a line"]
    assert run(tmp_path, REPORT, ranks=1) == 0
    assert capfd.readouterr().out == "0 1 0 1 127.0.0.1\n"


def test_run_runs_modules(tmp_path, capfd, monkeypatch):
    (tmp_path / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["run", "-n", "2", "-m", "some_module", "-m"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}] __main__ ['-m']" for rank in range(2)]


def interrupted_run(tmp_path: pathlib.Path, capfd: Any, program: str) -> tuple[str, str]:
    thread = interrupt_when(all_wait(tmp_path, 2))
    assert run(tmp_path, program, str(tmp_path), str(ROOT / "python")) == 130
    thread.join()
    return capfd.readouterr()


def test_ctrl_c_ends_a_run(tmp_path, capfd):
    out, err = interrupted_run(tmp_path, capfd, WAIT)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert [line for line in err.splitlines() if "Warning" not in line] == ["ringlet run: interrupted"], err


LOSE = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"{os.environ['RANK']} waits").touch()
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("Traceback (most recent call last):", *(f"  line {n}" for n in range(60)), sep="\\n", file=sys.stderr)
    raise RuntimeError("not saved") from None
"""


def test_what_else_ranks_say_at_ctrl_c_is_shown(tmp_path, capfd):
    err = interrupted_run(tmp_path, capfd, LOSE)[1].splitlines()
    for rank in range(2):
        assert err.count(f"[{rank}] RuntimeError: not saved") == 1 and f"[{rank}]   line 59" in err


FAIL_SLOWLY = """
import atexit, os, sys, time
atexit.register(time.sleep, 1)  # called after ringlet's: the other ranks end first
sys.path[:0] = sys.argv[1:]
import torch, ringlet, torch.distributed as dist
how = os.environ["HOW"]
dist.init_process_group("ringlet") if how == "torch" else ringlet.init()
call = dist.all_reduce if how == "torch" else ringlet.all_reduce
call(torch.ones(1))
if os.environ["RANK"] == "1":
    if how == "exit":
        sys.exit(7)
    try:
        1 / 0
    finally:
        if how == "torch":
            dist.destroy_process_group()
        if how == "finally":
            ringlet.finalize()
call(torch.ones(1))
"""


@pytest.mark.parametrize("how", ["finally", "exit", "plain", "torch"])
def test_run_names_the_rank_that_failed_first_and_not_those_that_lost_it(tmp_path, capfd, monkeypatch, how):
    monkeypatch.setenv("HOW", how)
    code = run(tmp_path, FAIL_SLOWLY, str(ROOT / "python"), ranks=3)
    told = capfd.readouterr().err.splitlines()[-1]
    assert (code, told) == (
        7 if how == "exit" else 1,
        f"ringlet run: rank 1 exited with code {code}; the other ranks were ended",
    )


LEAVES_EARLY = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, ringlet
ringlet.init(timeout=30)
for step in range(100):
    if ringlet.current().rank == 1 and step == 50:
        sys.exit(0)
    ringlet.all_reduce(torch.ones(100))
"""


def test_run_names_a_rank_that_ended_too_early_without_a_failure(tmp_path, capfd):
    assert run(tmp_path, LEAVES_EARLY, str(ROOT / "python"), ranks=2) == 1
    said = "ringlet run: rank 0 exited with code 1; rank 1 had ended before it, with code 0; the other ranks were ended"
    assert capfd.readouterr().err.splitlines()[-1] == said


BAR = """
import os, sys, time
for step in range(3):
    sys.stderr.write(f"\\r step {step}")
    sys.stderr.flush()
open(sys.argv[1] + os.environ["RANK"], "w").close()
while not os.path.exists(sys.argv[1] + "seen"):
    time.sleep(0.01)
"""


def test_run_passes_progress_bars_on_at_once(tmp_path):
    with started(tmp_path, BAR, str(tmp_path / "rank "), stderr=subprocess.PIPE) as process:
        seen = b""
        while seen.count(b"step 2") < 2:  # while the ranks run
            seen += os.read(process.stderr.fileno(), 1 << 16)
        assert b"\r[0]  step 2" in seen and b"\r[1]  step 2" in seen and b"\n" not in seen
        (tmp_path / "rank seen").touch()
        process.stderr.read()
    assert process.returncode == 0


LONG = """
import os, sys
if os.environ["RANK"] == "0":
    sys.stdout.write("x" * 80_000_000)
    sys.stdout.write("y\\nend")
"""


def test_run_passes_long_lines_on_in_linear_time(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        command = [sys.executable, "-m", "ringlet", *words(tmp_path, LONG)]
        subprocess.run(command, stdout=out, timeout=40, check=True)
    long, end, rest = (tmp_path / "out").read_bytes().split(b"\n")
    assert (len(long), long[:5], end, rest) == (80_000_005, b"[0] x", b"[0] end", b"")


STOPPED = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"{os.environ['RANK']} waits").write_text(str(os.getpid()))
while not pathlib.Path(sys.argv[1], "over").exists():
    time.sleep(0.01)
"""


def test_ctrl_z_stops_the_ranks_too(tmp_path):
    with started(tmp_path, STOPPED, str(tmp_path), start_new_session=True) as process:
        until(lambda: all_wait(tmp_path, 2)() and all(path.read_text() for path in tmp_path.glob("* waits")))
        pids = [str(process.pid), *(path.read_text() for path in tmp_path.glob("* waits"))]
        os.killpg(process.pid, signal.SIGTSTP)
        until(lambda: [state(pid) for pid in pids] == ["T"] * 3, BOUND_S)
        os.killpg(process.pid, signal.SIGCONT)
        until(lambda: "T" not in [state(pid) for pid in pids], BOUND_S)
        (tmp_path / "over").touch()
    assert process.returncode == 0


LEAVE_CHILDREN = """
import os, pathlib, signal, subprocess, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "600"])
(folder / f"{rank} new").write_text(str(child.pid))
(folder / f"{rank} new").rename(folder / f"{rank} waits")
while len(list(folder.glob("* waits"))) < 2:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else time.sleep(60)
"""


def test_children_of_killed_ranks_end(tmp_path, capfd):
    assert run(tmp_path, LEAVE_CHILDREN, str(tmp_path)) == 137
    until(lambda: gone(tmp_path.glob("* waits")), BOUND_S)


def test_run_works_where_pidfd_open_is_refused(tmp_path, capfd, monkeypatch):
    def refused(*arguments: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert run(tmp_path, FAIL) == 7
    assert capfd.readouterr().err == "ringlet run: rank 1 exited with code 7; the other ranks were ended\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_run_with_loopback_down_says_so_at_once(tmp_path):
    need_namespace("-n")
    done = ended("unshare", "-n", sys.executable, "-m", "ringlet", "run", "-n", 2, "program.py", timeout=60)
    assert done.returncode == 2
    said = "ringlet run: the ranks cannot meet at 127.0.0.1 (Network is unreachable): bring the loopback interface up"
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_a_run_that_ends_well_adds_nothing(tmp_path):
    """Nor does Python warn at its end of processes that nobody has waited for."""
    (tmp_path / "program.py").write_text("import ringlet\n\nringlet.init()\n")
    command = (sys.executable, "-m", "ringlet", "run", "-n", 2, tmp_path / "program.py")
    done = ended(*command, env=os.environ | {"PYTHONWARNINGS": "error::ResourceWarning"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_without_descriptors_says_so():
    done = ended("bash", "-c", f"ulimit -n 20; {sys.executable} -m ringlet run -n 2 program.py")
    assert done.returncode == 2
    assert re.fullmatch(r"ringlet run: .*Too many open files.*; raise ulimit -n\n", done.stderr), done.stderr


def test_a_run_without_a_store_says_why(monkeypatch, capfd):
    def refused(*arguments, **options):
        raise dist.DistNetworkError("The server socket has failed to bind.\nframe #0")

    monkeypatch.setattr(dist, "TCPStore", refused)
    assert main(["run", "-n", "2", "program.py"]) == 2
    said = "ringlet run: cannot serve the ranks' store: The server socket has failed to bind.; is there a limit"
    assert capfd.readouterr().err.startswith(said)
