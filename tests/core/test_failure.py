"""What a failure of one rank becomes on the others: the right kind of error, in time, naming what happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import ringlet
from kills import die, only_died, pass_together, seconds_since
from ranks import TRANSPORTS, on
from stalls import later, watched

PROMISE_SECONDS = 1.0


# --- a rank is killed -----------------------------------------------------------------------------------------------


def raises_peer_lost(act, stamp: str, victim: int) -> str:
    with watched() as stalls, pytest.raises(ringlet.PeerLost) as caught:
        act()
    late = seconds_since(stamp, stalls)
    assert late < PROMISE_SECONDS, f"PeerLost {late:.2f} s after the kill"
    named = rf"the process of rank {victim} is gone|the connection to rank {victim} ended"  # on another host
    assert re.search(named, str(caught.value)), str(caught.value)
    return str(caught.value)


TOO_LATE = "this rank had completed the call when its peer died"


def lose_a_peer_in_all_reduce(rank, world, stamp, moment, mode, algorithm):
    victim = world - 1
    count = 16 << 20 if moment == "middle" else 1000
    tensor = ringlet.empty(count).fill_(1)
    pass_together(ringlet.barrier, rank, world, f"{stamp} others")
    if rank == victim:
        if moment == "middle":
            ringlet.all_reduce(tensor, algorithm=algorithm, async_op=True)
            while tensor[0] == 1 and tensor[count // 2] == 1 and tensor[-1] == 1:
                pass  # until the first results are there
        die(stamp)

    def act():
        if mode == "sync":
            ringlet.all_reduce(tensor, algorithm=algorithm)
        else:
            works = [ringlet.all_reduce(tensor, algorithm=algorithm, async_op=True) for _ in range(4)]
            works[0].wait()

    try:
        text = raises_peer_lost(act, stamp, victim)
    except pytest.fail.Exception:
        if moment == "middle":
            return TOO_LATE
        raise
    assert f"rank {rank} of {world} in all_reduce #1 ({algorithm}, sum, float32, {count} elements)" in text
    for _ in range(2):
        with pytest.raises(ringlet.PeerLost, match="this group failed before"):
            ringlet.all_reduce(torch.ones(3))
    with pytest.raises(ringlet.PeerLost, match="this group failed before"):
        ringlet.send(torch.ones(3), (rank + 1) % world)


@pytest.mark.parametrize(
    ("join", "algorithm", "mode", "moment", "world"),
    [
        ("shared_memory", "ring", "sync", "before", 2),
        ("shared_memory", "ring", "async", "middle", 4),
        ("shared_memory", "butterfly", "sync", "middle", 2),
        ("shared_memory", "butterfly", "async", "before", 4),
        ("shared_memory", "two_shot", "sync", "middle", 4),
        ("shared_memory", "two_shot", "async", "before", 2),
        # On two hosts in turn: of the others only rank 1 reads what rank 3, the victim, sends, in rank 3's memory.
        ("mixed", "hierarchical", "sync", "middle", 4),
        ("mixed", "ring", "sync", "middle", 4),
    ],
)
def test_killed_in_all_reduce(pool, tmp_path, join, world, moment, mode, algorithm):
    """Where others have the processors, the victim may see the first results when the last ones are there, too."""
    for attempt in range(10):
        arguments = (str(tmp_path / f"stamp {attempt}"), moment, mode, algorithm)
        outcomes = pool.run(lose_a_peer_in_all_reduce, world, *arguments, join=join)
        only_died(outcomes, world - 1)
        if not any(outcome.value == TOO_LATE for outcome in outcomes):
            return
    pytest.fail("the victim never died in the middle of the call")


def lose_a_peer_on_one_processor(rank, world, stamp, processor):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    try:
        lose_a_peer_in_all_reduce(rank, world, stamp, "before", "sync", "ring")
    finally:
        os.sched_setaffinity(0, before)


def test_killed_where_other_work_fills_the_processor(pool, tmp_path):
    """Giving the processor up, as a wait does, may then take a time slice of each of the others."""
    processor = min(os.sched_getaffinity(0))
    endless = f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-S", "-c", endless], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for other in others:
            other.stdout.readline()
        only_died(pool.run(lose_a_peer_on_one_processor, 2, str(tmp_path / "stamp"), processor), 1)
    finally:
        for other in others:
            other.kill()
            other.communicate()


def lose_a_peer_elsewhere(rank, world, stamp, what):
    victim = world - 1
    pass_together(ringlet.barrier, rank, world, f"{stamp} others")
    if rank == victim:
        die(stamp)
    big = torch.ones(1 << 20)
    acts = {
        "recv": lambda: ringlet.recv(big, victim),
        "send": lambda: ringlet.send(big, victim),  # more than fits in the segments
        "send registered": lambda: ringlet.send(ringlet.empty(1 << 20), victim),
        "async recv": lambda: ringlet.recv(big, victim, async_op=True).wait(),
        "barrier": ringlet.barrier,
        "broadcast": lambda: ringlet.broadcast(big, victim),
        "gather": lambda: ringlet.gather(torch.ones(world << 20) if rank == 0 else None, big),
    }
    if what == "gather" and rank != 0:  # only the root misses the victim at once
        acts["gather"] = lambda: (ringlet.gather(None, big), ringlet.barrier())
    raises_peer_lost(acts[what], stamp, victim)


@pytest.mark.parametrize("what", ["recv", "send", "send registered", "async recv", "barrier", "broadcast", "gather"])
def test_killed_in_other_calls(pool, tmp_path, what):
    only_died(pool.run(lose_a_peer_elsewhere, 3, str(tmp_path / "stamp"), what), 2)


# --- a rank is stuck ------------------------------------------------------------------------------------------------

LIMITS = (0.4, 1.6, 6.4)  # seconds: the next one where the machine lets a rank not tell its peers what it waits for


def stall(rank, world, store, what, algorithm, limit):
    """The last rank does something else until the others have had their Timeout."""
    others = dist.FileStore(store, world)
    ringlet.all_reduce(torch.ones(1))
    if rank == world - 1:
        others.wait([f"done {q}" for q in range(world - 1)])
        return "", 0.0, 0.0
    start = time.monotonic()
    with watched() as stalls, pytest.raises(ringlet.Timeout) as caught:
        if what == "sync":
            ringlet.all_reduce(torch.ones(1000), algorithm=algorithm, timeout=limit)
        elif what == "async":
            ringlet.all_reduce(torch.ones(1000), algorithm=algorithm, timeout=limit, async_op=True).wait()
        else:
            ringlet.recv(torch.ones(1000), world - 1, timeout=limit)
    waited, stood_still = time.monotonic() - start, stalls.since(start)
    others.set(f"done {rank}", "")
    with pytest.raises(ringlet.Timeout, match="this group failed before"):
        ringlet.all_reduce(torch.ones(1000))
    return str(caught.value), waited, stood_still


def times_out(pool, folder, world, what, algorithm, transport, right):
    """Whether it does so in time and `right(rank, text, limit)` of every rank that waits."""
    for limit in LIMITS:
        told = pool.values(stall, world, str(folder / f"others {limit}"), what, algorithm, limit, join=transport)[:-1]
        wrong = [one for one in told if not 0 < one[1] < limit + PROMISE_SECONDS + one[2]]
        # Whoever's deadline comes first speaks for all, so no more can be said of one rank's wait.
        wrong += [] if max(waited for _, waited, _ in told) >= limit - 0.05 else told
        wrong += [one for rank, one in enumerate(told) if not right(rank, one[0], limit)]
        if not wrong:
            return
    pytest.fail("\n".join(map(str, wrong)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("what", "algorithm", "world"), [("async", "ring", 2), ("sync", "ring", 4), ("sync", "one_shot", 4)]
)
def test_stalled_rank_times_out(pool, tmp_path, transport, world, what, algorithm):
    def right(rank, text, limit):
        call = rf"rank {rank} of {world} in all_reduce #1 \({algorithm}, sum, float32, 1000 elements\), 0 of 4000 bytes"
        # In a chain of waits each waits for the one before it, and whoever's deadline comes first speaks for all: every
        # text names the one that is stuck.
        stuck = f"furthest behind is rank {world - 1}, which has not made this call"
        return re.match(call + r" done, round \d", text) and f"waited {limit} s for rank" in text and stuck in text

    times_out(pool, tmp_path, world, what, algorithm, transport, right)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stalled_sender_times_out(pool, tmp_path, transport):
    where = "rank 0 of 2 in recv from rank 1 (1000 elements of float32), 0 of 4000 bytes done: "
    said = where + "Timed out having waited "
    times_out(pool, tmp_path, 2, "recv", "", transport, lambda _, text, limit: text.startswith(f"{said}{limit} s"))


STOPPED_S = 13.0


def stopped_before_it_is_called(rank: int, world: int) -> None:
    """Rank 1's process stands still before anybody has connected to it, as in a debugger."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    ringlet.all_reduce(total := torch.ones(1000), timeout=60)
    assert total.eq(world).all()


@pytest.mark.slow(reason="waits longer than a connection is tried for where nobody listens")
def test_a_stopped_rank_is_waited_for_as_long_as_the_timeout_says(pool):
    stopped = pool.processes(2)[1].pid
    later(STOPPED_S, os.kill, stopped, signal.SIGCONT)
    pool.values(stopped_before_it_is_called, 2, join="tcp")


@on(2, *TRANSPORTS)
@pytest.mark.parametrize("warm", [True, False])
def test_a_late_rank_hears_of_the_failure(rank, world, folder, warm):
    """Also in calls that wait for nobody: a root's, and messages that a pipe has room for."""
    for what in ("broadcast", "reduce", "send"):
        group = ringlet.new_group([0, 1])
        if warm:
            ringlet.broadcast(torch.ones(3), 1, group=group)
        mark = f"{folder}/{what}"
        if rank == 0:
            with pytest.raises(ringlet.Timeout):
                ringlet.broadcast(torch.ones(3), 1, group=group, timeout=0.2)
            open(mark, "w").close()
            ringlet.barrier()
        else:
            while not os.path.exists(mark):
                time.sleep(0.01)
            calls = {
                "broadcast": lambda group=group: ringlet.broadcast(torch.ones(3), 1, group=group),
                "reduce": lambda group=group: ringlet.reduce(torch.ones(3), root=0, group=group),
                "send": lambda group=group: ringlet.send(torch.ones(3), 0, group=group),
            }
            told_at_once = group.transport in ("shared_memory", "threads") and what != "send"
            with pytest.raises(ringlet.Timeout, match="rank 0 reported: rank 0 of 2 in broadcast"):
                for _ in range(1 if told_at_once else 1000):  # the report may be on its way
                    calls[what]()
            ringlet.barrier()
        group.close(0)


def message_against_collective(rank, world, verb, first, limit):
    """Rank 0 waits in a message with rank 1, which waits for it in a collective; `first` has the shorter timeout."""
    ringlet.all_reduce(torch.ones(10))
    limit = limit if rank == first else 20
    with pytest.raises(ringlet.Timeout) as caught:
        if rank == 0:
            getattr(ringlet, verb)(torch.ones(8 << 20), 1, timeout=limit)
        else:
            ringlet.all_reduce(torch.ones(1000), timeout=limit)
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("verb", "where", "first"), [("send", "in send to", 0), ("recv", "in recv from", 1)])
def test_a_message_against_a_collective_names_both(pool, transport, verb, where, first):
    message, collective = f"rank 0 of 2 {where} rank 1 (8388608 elements of float32)", "rank 1 of 2 in all_reduce #1 ("
    # A rank says in what it waits when it has waited for a while; where the machine lets it not, it has longer.
    for limit in (0.4, 2.0, 8.0):
        texts = pool.values(message_against_collective, 2, verb, first, limit, join=transport)
        if all(message in text and collective in text for text in texts):
            return
    pytest.fail("\n".join(texts))


@on(2, *TRANSPORTS)
def test_a_message_that_came_is_not_named(rank, world, path):
    """A message that waited for long and then came is no longer what a rank waits in."""
    message, others = torch.zeros(10), dist.FileStore(path, world)
    if rank == 0:
        ringlet.recv(message, 1)
        others.set("received", "")
        others.wait(["timed out"])  # "in other work", while the other's call ends at its deadline
        return
    time.sleep(0.3)  # in which rank 0 says in what it waits
    ringlet.send(message, 0)
    others.wait(["received"])
    with pytest.raises(ringlet.Timeout) as caught:
        ringlet.all_reduce(torch.ones(1000), timeout=0.3)
    others.set("timed out", "")
    assert "in recv" not in str(caught.value), str(caught.value)


# --- calls that do not match ----------------------------------------------------------------------------------------


def all_blocks(x, root):
    """At the root alone."""
    return x.repeat(ringlet.current().world) if ringlet.current().rank == root else None


def blocks_of(x):
    return [x.clone() for _ in range(ringlet.current().world)]


def roots(call):
    return lambda x: call(x, 0), lambda x: call(x, 1), ("root 0", "root 1")


MISMATCHES = {
    "op": (lambda x: ringlet.all_reduce(x, "sum"), lambda x: ringlet.all_reduce(x, "max"), ("sum", "max")),
    "dtype": (
        lambda x: ringlet.all_reduce(x),
        lambda x: ringlet.all_reduce(x.to(torch.int32)),
        ("float32", "int32"),
    ),
    "same bytes": (
        lambda x: ringlet.all_reduce(x),
        lambda x: ringlet.all_reduce(x.to(torch.bfloat16).repeat(2)),
        ("float32", "bfloat16"),
    ),
    "count": (lambda x: ringlet.all_reduce(x), lambda x: ringlet.all_reduce(x.repeat(2)), ("elements", "elements")),
    "no elements": (lambda x: ringlet.all_reduce(x), lambda x: ringlet.all_reduce(x[:0]), ("elements", " 0 elements")),
    "algorithm": (
        lambda x: ringlet.all_reduce(x, algorithm="ring"),
        lambda x: ringlet.all_reduce(x, algorithm="butterfly"),
        ("ring", "butterfly"),
    ),
    "broadcast root": roots(ringlet.broadcast),
    "broadcast tree root": roots(lambda x, root: ringlet.broadcast(x, root, algorithm="tree")),
    "reduce root": roots(ringlet.reduce),
    "scatter root": roots(lambda x, root: ringlet.scatter(x, all_blocks(x, root), root)),
    "gather root": roots(lambda x, root: ringlet.gather(all_blocks(x, root), x, root)),
    "order": (
        lambda x: (ringlet.all_reduce(x), ringlet.broadcast(x, 0)),
        lambda x: (ringlet.broadcast(x, 0), ringlet.all_reduce(x)),
        ("all_reduce #", "broadcast #"),
    ),
    "collective": (lambda x: ringlet.all_reduce(x), lambda x: ringlet.barrier(), ("all_reduce #", "barrier #")),
    "async": (
        lambda x: [ringlet.all_reduce(x, async_op=True) for _ in range(3)][-1].wait(),
        lambda x: [ringlet.all_reduce(x, op, async_op=True) for op in ("sum", "min", "sum")][-1].wait(),
        ("sum", "min"),
    ),
    "lists of blocks": (
        lambda x: ringlet.all_to_all(blocks_of(x), blocks_of(x)),
        lambda x: ringlet.all_to_all(torch.cat(blocks_of(x)), torch.cat(blocks_of(x))),
        ("which tell the lengths of its blocks", "all_to_all #"),
    ),
}


def mismatch(rank, world, name, count):
    """Rank 1 does the other thing; twice the matching call before, so that both parities have been used."""
    first, second, words = MISMATCHES[name]
    for _ in range(2):
        ringlet.all_reduce(torch.ones(3))
    tensor = torch.ones(count)
    with pytest.raises(ringlet.InvalidUsage) as caught:
        (second if rank == 1 else first)(tensor)
        ringlet.barrier()  # a rank that needs nothing of the others for its own call hears of it here
    text = str(caught.value)
    assert "calls do not match: rank" in text and "all ranks of a group must make the same calls" in text, text
    # Between hosts both may have done what their own call asked of them: the barrier tells that others came before.
    late = "tcp" in ringlet.current().transport and "after other calls" in text
    for word in () if late else words:
        assert word in text, text
    with pytest.raises(ringlet.InvalidUsage, match="this group failed before"):
        ringlet.all_reduce(tensor)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world", "count"), [(2, 4), (3, 30_000)])
def test_calls_that_differ_are_named_on_every_rank(pool, transport, world, count):
    wrong = []
    for name in MISMATCHES:
        outcomes = pool.run(mismatch, world, name, count, join=transport, timeout=20)
        wrong += [f"{name}: {outcome}" for outcome in outcomes if outcome.kind is not None]
    assert not wrong, "\n".join(wrong)
