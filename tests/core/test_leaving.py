"""Ranks that go on purpose: how groups end, and what becomes of the others' calls."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import TRANSPORTS, on

PROCESSES = [transport for transport in TRANSPORTS if transport != "threads"]


def leave_early(rank, world, store):
    ringlet.all_reduce(torch.ones(10))
    if rank == world - 1:
        ringlet.finalize()
        return
    with pytest.raises(ringlet.PeerLost, match=rf"rank {world - 1} left the group|reported: .* left the group"):
        ringlet.all_reduce(torch.ones(10))


def abort_pending(rank, world, store):
    others = dist.FileStore(store, world)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("function", [leave_early, abort_pending])
def test_a_rank_that_goes(pool, tmp_path, transport, world, function):
    pool.values(function, world, str(tmp_path / "others"), join=transport)


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


@on(2, *PROCESSES)
def test_a_group_that_ends_beside_a_call(rank, world, path):
    """The main thread leaves the default group while another is in a call that nobody answers."""
    others = dist.FileStore(path, world)
    ringlet.all_reduce(torch.ones(10))
    if rank == 0:
        raised = []
        handle = ringlet.current().handle

        def call():
            with pytest.raises(ringlet.PeerLost, match="rank 0 closed the group while this call was pending") as caught:
                ringlet.all_reduce(torch.ones(1000))
            raised.append(caught.value)

        thread = threading.Thread(target=call)
        thread.start()
        while handle.sequence < 2:
            time.sleep(0.001)
        del handle
        ringlet.finalize()
        gc.collect()
        thread.join(10)
        others.set("ended", "")
        assert len(raised) == 1
    else:
        others.wait(["ended"])


@pytest.mark.parametrize("transport", PROCESSES)
def test_who_left_and_ended_is_not_missed(pool, tmp_path, transport):
    outcomes = pool.run(leave_and_exit, 3, str(tmp_path / "others"), join=transport)
    assert [outcome.kind for outcome in outcomes] == [None, None, "died"], "\n".join(map(str, outcomes))


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
