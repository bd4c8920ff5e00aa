"""Random programs: calls of all kinds, groups and threads mixed, as no list of cases has them.

All ranks draw the same program from the seed; how a rank goes about it, its delays, what it waits for first and on
which thread, is drawn by each for itself. Every result is compared (cases.py): data differ from step to step, so that
what an earlier call left behind does not pass for an answer. RINGLET_TEST_PROGRAMS asks for more programs.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import ringlet
from cases import ALGORITHMS, MOVES, ONLY_IN_PLACE, Case, Checks, issue, placed, prepare
from exact_data import DTYPES, OPS, PERIOD, input_of, supported
from kills import die, only_died, seconds_since
from ranks import TRANSPORTS
from ringlet.schedule.collectives import REDUCTIONS
from stalls import watched

MEMORIES = ("registered", "ordinary", "mixed", "offset")
MOST_PENDING = 12


@dataclass
class Pending:
    group: ringlet.Group
    work: Any
    check: Callable[[], None]


class Program:
    """One rank's part of the program of a seed."""

    def __init__(self, seed: int) -> None:
        everyone = ringlet.current()
        self.lot = random.Random(seed)  # the same on every rank
        self.own = random.Random(1000 * seed + everyone.rank)
        self.checks = Checks()
        self.groups: list[tuple[list[int], ringlet.Group | int]] = [(list(range(everyone.world)), everyone)]
        self.pending: list[Pending] = []
        self.waiters = ThreadPoolExecutor(4)

    def run(self, steps: int) -> None:
        kinds = {self.call: 12, self.messages: 4, self.make_group: 1, self.end_group: 1, self.two_threads: 1}
        with self.waiters:
            for _ in range(steps):
                self.step(kinds)
            self.settle(len(self.pending))
        self.checks.conclude()

    def run_until_error(self, begin: Callable[[], None]) -> ringlet.Error:
        """Calls and messages on some groups, for as long as they go well; then the error. begin: when all are there."""
        for _ in range(3):
            self.make_group()
        ringlet.barrier()
        begin()
        try:
            with self.waiters:
                while True:
                    self.step({self.call: 12, self.messages: 4})
        except ringlet.Error as error:
            for _, group in self.groups:  # for the others to know; at once, since several that wait add up
                if isinstance(group, ringlet.Group):
                    group.close(0)
            self.checks.conclude()
            return error

    def step(self, kinds: dict[Callable[[], None], int]) -> None:
        step = self.lot.choices(list(kinds), list(kinds.values()))[0]
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.03)
        step()
        self.settle(self.own.choice((0, 0, 1, 2)) + max(0, len(self.pending) - MOST_PENDING))

    def call(self) -> None:
        members, group = self.lot.choice(self.groups)
        case = draw(self.lot, len(members))
        in_background = self.lot.random() < 0.5
        if not isinstance(group, ringlet.Group):
            return
        call = prepare(case, group.rank, group.world)
        work = issue(call, group.rank, group=group, async_op=in_background)
        if in_background:
            self.pending.append(Pending(group, work, lambda: call.check(self.checks)))
        else:
            call.check(self.checks)

    def messages(self) -> None:
        """A few between random pairs; a rank posts what it receives and what it sends in an order of its own."""
        members, group = self.lot.choice(self.groups)
        world = len(members)
        if world == 1:
            return
        planned = []
        for number in range(self.lot.randint(1, 2 * world)):
            sender, receiver = self.lot.sample(range(world), 2)
            planned.append((sender, receiver, number, draw_count(self.lot, world), self.lot.choice(DTYPES)))
        if not isinstance(group, ringlet.Group):
            return
        mine = [message for message in planned if group.rank in message[:2]]
        by_peer: dict[tuple[int, bool], list[Any]] = {}
        for message in mine:
            sending = message[0] == group.rank
            by_peer.setdefault((message[1] if sending else message[0], sending), []).append(message)
        while by_peer:  # in order between two, in any order otherwise
            (peer, sending), queue = self.own.choice(list(by_peer.items()))
            self.message(group, peer, sending, queue.pop(0))
            if not queue:
                del by_peer[peer, sending]

    def message(self, group: ringlet.Group, peer: int, sending: bool, planned: tuple[int, int, int, int, Any]) -> None:
        sender, _, number, count, dtype = planned
        data = input_of(dtype, "sum", group.world, sender, count + number)[number:]
        memory = self.own.choice(("registered", "ordinary", "offset"))
        if sending:
            tensor = placed(data, memory, group.rank)
            work = ringlet.send(tensor, peer, group=group, async_op=True)
        else:
            tensor = placed(torch.zeros_like(data.view(torch.uint8)).view(dtype), memory, group.rank)
            work = ringlet.recv(tensor, peer, group=group, async_op=True)
        what = f"message {planned} at rank {group.rank} of {group.world}"
        self.pending.append(Pending(group, work, lambda: self.checks.equal(what, tensor, data)))

    def make_group(self) -> None:
        everyone = self.groups[0][0]
        members = self.lot.sample(everyone, self.lot.randint(1, len(everyone)))
        self.groups.append((members, ringlet.new_group(members)))

    def end_group(self) -> None:
        """As soon as this rank has what it wants of it; the others may not be so far."""
        if len(self.groups) == 1:
            return
        _, group = self.groups.pop(self.lot.randrange(1, len(self.groups)))
        if not isinstance(group, ringlet.Group):
            return
        for one in [one for one in self.pending if one.group is group]:
            self.finish(one)
        group.close()

    def two_threads(self) -> None:
        """Calls on two groups at once, each on a thread of its own."""
        everyone = list(range(len(self.groups[0][0])))
        other = ringlet.new_group(everyone)
        assert isinstance(other, ringlet.Group)
        seeds = [self.lot.random(), self.lot.random()]

        def body(group: ringlet.Group, seed: float) -> None:
            lot = random.Random(seed)
            for _ in range(6):
                call = prepare(draw(lot, group.world), group.rank, group.world)
                issue(call, group.rank, group=group)
                call.check(self.checks)

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            bodies = [threads.submit(body, *pair) for pair in zip((self.groups[0][1], other), seeds, strict=True)]
        other.close()
        for one in bodies:
            one.result()

    def settle(self, some: int) -> None:
        """Waits for a few of the pending calls, in any order, on this thread or on others at once."""
        chosen = self.own.sample(self.pending, min(some, len(self.pending)))
        if self.own.random() < 0.3:
            for waiting in [self.waiters.submit(one.work.wait) for one in chosen]:
                waiting.result()
        for one in chosen:
            self.finish(one)

    def finish(self, one: Pending) -> None:
        self.pending.remove(one)
        if self.own.random() < 0.2:
            while not one.work.is_completed():
                time.sleep(0.001)
        one.work.wait()
        one.check()


def draw_count(lot: random.Random, world: int) -> int:
    highest = lot.choice((3000, 3000, 90_000))
    return lot.choice((0, 1, world - 1, world + 1, *(lot.randint(2, highest) for _ in range(3))))


def draw(lot: random.Random, world: int) -> Case:
    collective = lot.choice(("all_reduce", *REDUCTIONS, *MOVES))
    op = lot.choice(OPS) if collective in REDUCTIONS else "sum"
    return Case(
        collective,
        lot.choice((*ALGORITHMS[collective], "auto")),
        lot.choice([dtype for dtype in DTYPES if supported(dtype, op)]),
        op,
        draw_count(lot, world),
        lot.choice(MEMORIES),
        lot.random() < 0.5 and collective != "all_to_all" and collective not in ONLY_IN_PLACE,
        lot.randrange(world),
        lot.randrange(PERIOD),
    )


def run_programs(rank: int, world: int, seeds: range, steps: int) -> None:
    for seed in seeds:
        try:
            Program(seed).run(steps)
        except Exception as error:
            raise AssertionError(f"program {seed} at rank {rank} of {world}: {error}") from error


def lose_a_rank(rank: int, world: int, stamp: str, seed: int) -> tuple[str, str, float]:
    """A program whose last rank is killed at some moment: the error that ends it here, its words, and how many seconds
    after that it came, without those in which this process stood still."""

    def begin() -> None:
        if rank == world - 1:
            threading.Timer(0.3 * random.Random(seed).random(), die, (stamp,)).start()

    with watched() as stalls:
        error = Program(seed).run_until_error(begin)
    return type(error).__name__, str(error), seconds_since(stamp, stalls)


PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "1"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 60
# A rank that hears of it tells the others of its groups, those theirs.
KNOWN_WITHIN_SECONDS = 6.0


def test_programs(everyone):
    everyone(run_programs, range(FIRST, FIRST + PROGRAMS), STEPS)


@pytest.mark.parametrize("transport", [transport for transport in TRANSPORTS if transport != "threads"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_program_that_loses_a_rank(pool, tmp_path, transport, world):
    """Whatever it is in: what came is right, and what does not come is PeerLost everywhere, soon."""
    stamp = tmp_path / "stamp"
    for seed in range(FIRST, FIRST + PROGRAMS):
        outcomes = pool.run(lose_a_rank, world, str(stamp), seed, join=transport)
        only_died(outcomes, world - 1)
        told = [outcome.value for outcome in outcomes[:-1]]
        assert all(kind == "PeerLost" and late < KNOWN_WITHIN_SECONDS for kind, _, late in told), (seed, told)
