"""Ranks that go on purpose: how groups end, and what becomes of the others' calls."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
import stalls
from kills import only_died
from programs import ended
from ranks import TRANSPORTS, on
from refusals import refused
from ringlet import _C
from ringlet import group as groups

PROCESSES = [transport for transport in TRANSPORTS if transport != "threads"]


@on(3, *TRANSPORTS)
def test_a_rank_that_aborts(rank, world, path):
    others = dist.FileStore(path, world)
    if rank == 0:
        work = ringlet.all_reduce(torch.ones(10), async_op=True)
        ringlet.current().abort("rank 0 has had enough")
        with pytest.raises(ringlet.PeerLost, match="rank 0 has had enough"):
            work.wait()
        with pytest.raises(ringlet.PeerLost, match="rank 0 has had enough"):
            ringlet.all_reduce(torch.ones(10))
        others.set("aborted", "")
    else:
        others.wait(["aborted"])
        # Who has heard of it leaves too, and a rank that is late may find that one gone first.
        with pytest.raises(ringlet.PeerLost, match=r"rank [01] left the group"):
            for _ in range(2):  # the first may find all that it needs
                ringlet.all_reduce(torch.ones(10))


def leave_and_exit(rank, world, store):
    """The last rank ends well while the others still have messages for each other."""
    others = dist.FileStore(store, world)
    ringlet.all_reduce(torch.ones(10))
    if rank == world - 1:
        others.set("pid", str(os.getpid()))
        others.wait([f"watched by {q}" for q in range(world - 1)])
        ringlet.finalize()
        os._exit(0)
    end = os.pidfd_open(int(others.get("pid")))
    others.set(f"watched by {rank}", "")
    if rank == 0:
        assert ringlet.recv(torch.zeros(1000), 1).eq(1).all()
    else:
        assert select.select([end], [], [], 30)[0], "the rank that left does not end"
        time.sleep(0.2)  # rank 0 looks at its peers' processes every 20 ms
        ringlet.send(torch.ones(1000), 0)
    os.close(end)


@pytest.mark.parametrize("transport", PROCESSES)
def test_who_left_and_ended_is_not_missed(pool, tmp_path, transport):
    only_died(pool.run(leave_and_exit, 3, str(tmp_path / "others"), join=transport), 2)


ENDING = """
import sys
import torch
import torch.distributed as dist
import ringlet

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("ringlet", store=store, rank=rank, world_size=2)
dist.barrier()
if rank == 0:
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    work.get_future().then(lambda future: print("told", flush=True))
else:
    sys.stdin.read()
"""


def test_a_program_that_ends_in_the_middle_of_a_call(tmp_path):
    """Without destroy_process_group: the call ends with an error while there still is a Python to tell of it."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out, error = ranks[0].communicate(timeout=60)
        assert (ranks[0].returncode, out) == (0, "told\n"), error
        _, error = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 0, error
    finally:
        for rank in ranks:
            rank.kill()


# --- closing a group


def closed_after_a_kill(rank, world, path):
    """A peer that was killed never departs; its end gives this rank's range back."""
    ringlet.init(0, 1, dist.HashStore(), transport="shared_memory")  # makes the heap
    ringlet.finalize()
    before = _C.heap()["allocated_bytes"]
    ringlet.init(rank, world, dist.FileStore(path, world), transport="shared_memory", timeout=20)
    ringlet.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ringlet.PeerLost):
        ringlet.all_reduce(torch.ones(10))
        ringlet.all_reduce(torch.ones(10))
    ringlet.finalize()
    return _C.heap()["allocated_bytes"] - before


@pytest.mark.parametrize(
    "call",
    [
        "ringlet.all_reduce(tensor)",
        "ringlet.all_reduce(tensor, async_op=True).wait()",
        "ringlet._C.gpu_status()",
    ],
)
def test_python_may_end_beside_a_thread_that_calls(call):
    """Python ends a thread that asks for its lock then, and in the midst of C++ that ended the process by SIGABRT."""
    program = f"""
import threading, time, torch, torch.distributed as dist, ringlet

def call():
    tensor = torch.ones(1 << 16)
    while True:
        try:
            {call}
        except ringlet.Error:  # the group has been closed
            pass

ringlet.init(rank=0, world=1, store=dist.HashStore())
for _ in range(6):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.2)
"""
    done = ended(sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_killed_peer_holds_nothing(pool, tmp_path):
    outcome = pool.run(closed_after_a_kill, 2, str(tmp_path / "store"), join="nothing")[0]
    assert outcome.kind is None and outcome.value <= 0, outcome


@on(2)
def test_a_group_whose_close_is_refused_stays_open(rank, world):
    group, told = ringlet.current(), []

    def close(*_):
        for end in (group.close, ringlet.finalize):
            refused(r"close\(\) in a signal handler that interrupts a call", end)
            told.append(repr(group))

    if rank == 1:
        ringlet.recv(torch.ones(1), 0)  # the handler has run
        ringlet.send(torch.ones(4), 0)
    else:
        before = signal.signal(signal.SIGUSR1, close)
        work = ringlet.recv(torch.ones(4), 1, async_op=True)
        stalls.later(0.2, os.kill, os.getpid(), signal.SIGUSR1)
        while len(told) < 2:
            with pytest.raises(ringlet.Timeout):
                work.wait(1.0)
        signal.signal(signal.SIGUSR1, before)
        ringlet.send(torch.ones(1), 1)
        work.wait()
    assert not any("closed" in text for text in told) and len(told) == 2 * (rank == 0)
    assert ringlet.all_reduce(torch.ones(1)).item() == world and ringlet.current() is group
    group.close(5)
    refused("on a group that was closed", ringlet.all_reduce, torch.ones(1))
    ringlet.finalize()
    assert not groups.has_default()


@on(2, *PROCESSES)
def test_a_call_in_a_handler_is_refused(rank: int, world: int, path: str) -> None:
    """It would wait for the call that it interrupts. The refusal says so, and that call goes on."""
    store, told = dist.FileStore(path, world), []

    def call(*_: object) -> None:
        refused("a call in a signal handler that interrupts a call of the group", ringlet.all_reduce, torch.ones(1))
        told.append(True)
        store.set("handled", "")

    if rank == 1:
        store.wait(["handled"])
        assert ringlet.all_reduce(torch.ones(4)).eq(world).all()
        return
    before = signal.signal(signal.SIGUSR1, call)
    try:
        stalls.later(0.2, os.kill, os.getpid(), signal.SIGUSR1)
        assert ringlet.all_reduce(torch.ones(4)).eq(world).all() and told
    finally:
        signal.signal(signal.SIGUSR1, before)


@on(2)
def test_a_handler_may_drop_the_group_whose_message_it_interrupts(rank: int, world: int, path: str) -> None:
    """A handler drops the last reference to a group in whose message its thread waits."""
    store = dist.FileStore(path, world)
    if rank == 1:
        group = ringlet.new_group([0, 1])
        store.wait(["ended"])
        assert group is not None, "kept until then"
        return
    held = [ringlet.new_group([0, 1])]
    work = ringlet.recv(torch.ones(4), 1, group=held[0], async_op=True)
    before = signal.signal(signal.SIGUSR1, lambda *_: held.clear())
    try:
        stalls.later(0.3, os.kill, os.getpid(), signal.SIGUSR1)
        with pytest.raises(ringlet.Error):
            work.wait(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
        store.set("ended", "")
    assert not held


@pytest.mark.parametrize("patience", [0, 0.5, 3, timedelta(0), timedelta(seconds=1)])
def test_the_patience_of_a_close_is_a_time_as_any_other(patience):
    group = ringlet.init(0, 1, transport="threads", name="patience")
    group.close(patience)
    assert repr(group).endswith("closed>")
    ringlet.finalize()
