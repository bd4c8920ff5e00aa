"""Random programs of torch.distributed: its calls of all kinds, on groups, mixed as no list of cases has them.

As test_random_calls.py: all ranks draw the same program from the seed, and each for itself what it waits for, when and
how. What must come is computed from every rank's input, which each rank knows. RINGLET_TEST_PROGRAMS asks for more.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from cases import Checks, placed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.complex64)
REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
BITWISE = ("BAND", "BOR", "BXOR")
MEMORIES = ("registered", "ordinary", "mixed", "offset")


@dataclass
class Drawn:
    """What all ranks of a call agree about."""

    world: int
    seed: int
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    counts: list[list[int]]
    root: int
    in_background: bool
    memory: str

    def __repr__(self) -> str:
        return f"{self.op} {self.dtype} {self.shape} root {self.root} of {self.world}, {self.memory}"

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    def value(self, of: Any, shape: tuple[int, ...] | torch.Size | None = None) -> torch.Tensor:
        """Small integers, another table for everything that can be asked for."""
        shape = self.shape if shape is None else tuple(shape)
        generator = torch.Generator().manual_seed(hash((self.seed, of)) % (1 << 62))
        low, high = (0, 3) if self.dtype == torch.uint8 or self.op in BITWISE else (-2, 3)
        values = torch.randint(low, high, shape, generator=generator)
        if self.op == "AVG":
            values = values * self.world
        return values.to(self.dtype)

    def place(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        return placed(values.flatten(), self.memory, rank).view(values.shape)

    def input(self, rank: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.place(self.value(rank, shape), rank)

    def blank(self, shape: Any, rank: int) -> torch.Tensor:
        return self.place(torch.full(tuple(shape), 99).to(self.dtype), rank)

    def reduced(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.combined([self.value(q, shape) for q in range(self.world)])

    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = functools.reduce(REDUCTIONS[self.op], parts)
        if self.op != "AVG":
            return total
        return (total / self.world).to(self.dtype)


def _defined(op: str, dtype: torch.dtype) -> bool:
    if op in BITWISE:
        return not dtype.is_floating_point and not dtype.is_complex
    return not dtype.is_complex or op in ("SUM", "AVG")


def draw(lot: random.Random, world: int) -> Drawn:
    """All of a call that its ranks agree about: also ranks that take no part draw it."""
    op = lot.choice(list(REDUCTIONS))
    dtypes = [dtype for dtype in DTYPES if _defined(op, dtype)]
    shape = lot.choice(((), (lot.randrange(3),), (lot.randrange(4), lot.randrange(1, 9)), (lot.randrange(20_000),)))
    counts = [[lot.choice((0, 1, 5, 900)) for _ in range(world)] for _ in range(world)]
    seed, in_background = lot.randrange(1 << 20), lot.random() < 0.5
    return Drawn(world, seed, op, lot.choice(dtypes), shape, counts, lot.randrange(world), in_background,
                 lot.choice(MEMORIES))  # fmt: skip


# --- programs

MOST_PENDING = 10


@dataclass
class Group:
    members: list[int]  # by rank of the group
    handle: Any  # None: this rank is no member

    @property
    def world(self) -> int:
        return len(self.members)

    @property
    def rank(self) -> int:
        return self.members.index(dist.get_rank())


@dataclass
class Pending:
    group: Group
    works: list[Any]
    check: Callable[[], None]


class Program:
    """One rank's part of the program of a seed."""

    def __init__(self, seed: int) -> None:
        self.lot = random.Random(seed)  # the same on every rank
        self.own = random.Random(1000 * seed + dist.get_rank())
        self.checks = Checks()
        self.everyone = Group(list(range(dist.get_world_size())), dist.group.WORLD)
        self.groups = [self.everyone]
        self.pending: list[Pending] = []
        self.step = 0

    def run(self, steps: int) -> None:
        kinds: dict[Callable[..., None], int] = {
            self.all_reduce: 4, self.reduce: 2, self.broadcast: 2, self.all_gather: 2, self.all_gather_into: 2,
            self.gather: 2, self.scatter: 2, self.reduce_scatter: 2, self.reduce_scatter_tensor: 2, self.all_to_all: 2,
            self.all_to_all_single: 2, self.barrier: 1, self.messages: 4, self.objects: 2, self.coalesced: 2,
            self.functional: 2, self.message_of_any: 1, self.differentiated: 1, self.two_threads: 1,
        }  # fmt: skip
        for self.step in range(steps):
            if self.own.random() < 0.1:
                time.sleep(self.own.random() * 0.02)
            if self.lot.random() < 0.06:
                self.lot.choice((self.make_group, self.make_group, self.end_group))()
            kind = self.lot.choices(list(kinds), list(kinds.values()))[0]
            group = self.lot.choice(self.groups)
            drawn = draw(self.lot, group.world)
            if group.handle is not None:
                kind(group, drawn)
            self.settle(self.own.choice((0, 0, 1, 2)) + max(0, len(self.pending) - MOST_PENDING))
        self.settle(len(self.pending))
        for group in self.groups[1:]:
            if group.handle is not None:
                dist.destroy_process_group(group.handle)
        dist.barrier()
        self.checks.conclude()

    # -- collectives --

    def all_reduce(self, group: Group, drawn: Drawn) -> None:
        tensor = drawn.input(group.rank)
        work = dist.all_reduce(tensor, drawn.reduce_op, group.handle, async_op=drawn.in_background)
        self.expect(group, drawn, work, [(tensor, drawn.reduced())])

    def reduce(self, group: Group, drawn: Drawn) -> None:
        tensor, at_root = drawn.input(group.rank), group.rank == drawn.root
        work = dist.reduce(
            tensor, op=drawn.reduce_op, group=group.handle, async_op=drawn.in_background, group_dst=drawn.root
        )
        self.expect(group, drawn, work, [(tensor, drawn.reduced() if at_root else drawn.value(group.rank))])

    def broadcast(self, group: Group, drawn: Drawn) -> None:
        tensor = drawn.input(group.rank)
        work = dist.broadcast(tensor, group=group.handle, async_op=drawn.in_background, group_src=drawn.root)
        self.expect(group, drawn, work, [(tensor, drawn.value(drawn.root))])

    def all_gather(self, group: Group, drawn: Drawn) -> None:
        """Of tensors of different sizes."""
        sizes = drawn.counts[0]
        wanted = [drawn.value(q, (sizes[q],)) for q in range(group.world)]
        outputs = [drawn.blank((size,), group.rank) for size in sizes]
        mine = drawn.place(wanted[group.rank], group.rank)
        work = dist.all_gather(outputs, mine, group.handle, async_op=drawn.in_background)
        self.expect(group, drawn, work, zip(outputs, wanted, strict=True))

    def all_gather_into(self, group: Group, drawn: Drawn) -> None:
        shape = drawn.shape or (1,)
        wanted = torch.cat([drawn.value(q, shape) for q in range(group.world)])
        output = drawn.blank(wanted.shape, group.rank)
        mine = drawn.input(group.rank, shape)
        work = dist.all_gather_into_tensor(output, mine, group.handle, async_op=drawn.in_background)
        self.expect(group, drawn, work, [(output, wanted)])

    def gather(self, group: Group, drawn: Drawn) -> None:
        wanted = [drawn.value(q) for q in range(group.world)] if group.rank == drawn.root else []
        outputs = [drawn.blank(drawn.shape, group.rank) for _ in wanted]
        mine = drawn.input(group.rank)
        work = dist.gather(
            mine, outputs or None, group=group.handle, async_op=drawn.in_background, group_dst=drawn.root
        )
        self.expect(group, drawn, work, zip(outputs, wanted, strict=True))

    def scatter(self, group: Group, drawn: Drawn) -> None:
        output = drawn.blank(drawn.shape, group.rank)
        inputs = [drawn.input(q) for q in range(group.world)] if group.rank == drawn.root else None
        work = dist.scatter(output, inputs, group=group.handle, async_op=drawn.in_background, group_src=drawn.root)
        self.expect(group, drawn, work, [(output, drawn.value(group.rank))], inputs)

    def reduce_scatter(self, group: Group, drawn: Drawn) -> None:
        sizes = drawn.counts[0]
        inputs = [drawn.place(drawn.value((group.rank, q), (sizes[q],)), group.rank) for q in range(group.world)]
        output = drawn.blank((sizes[group.rank],), group.rank)
        work = dist.reduce_scatter(output, inputs, drawn.reduce_op, group.handle, async_op=drawn.in_background)
        parts = [drawn.value((q, group.rank), output.shape) for q in range(group.world)]
        self.expect(group, drawn, work, [(output, drawn.combined(parts))], inputs)

    def reduce_scatter_tensor(self, group: Group, drawn: Drawn) -> None:
        shape = drawn.shape or (1,)
        whole = (group.world * shape[0], *shape[1:])
        output, mine = drawn.blank(shape, group.rank), drawn.input(group.rank, whole)
        work = dist.reduce_scatter_tensor(output, mine, drawn.reduce_op, group.handle, async_op=drawn.in_background)
        wanted = drawn.reduced(whole)[group.rank * shape[0] : (group.rank + 1) * shape[0]]
        self.expect(group, drawn, work, [(output, wanted)], mine)

    def all_to_all(self, group: Group, drawn: Drawn) -> None:
        rank, counts = group.rank, drawn.counts
        inputs = [drawn.place(drawn.value((rank, q), (counts[rank][q],)), rank) for q in range(group.world)]
        wanted = [drawn.value((q, rank), (counts[q][rank],)) for q in range(group.world)]
        outputs = [drawn.blank(tensor.shape, rank) for tensor in wanted]
        work = dist.all_to_all(outputs, inputs, group.handle, async_op=drawn.in_background)
        self.expect(group, drawn, work, zip(outputs, wanted, strict=True), inputs)

    def all_to_all_single(self, group: Group, drawn: Drawn) -> None:
        """Rows of three."""
        rank, counts = group.rank, drawn.counts
        sent, received = counts[rank], [row[rank] for row in counts]
        mine = drawn.place(torch.cat([drawn.value((rank, q), (sent[q], 3)) for q in range(group.world)]), rank)
        wanted = torch.cat([drawn.value((q, rank), (received[q], 3)) for q in range(group.world)])
        output = drawn.blank(wanted.shape, rank)
        work = dist.all_to_all_single(output, mine, received, sent, group.handle, async_op=drawn.in_background)
        self.expect(group, drawn, work, [(output, wanted)], mine)

    def barrier(self, group: Group, drawn: Drawn) -> None:
        self.expect(group, drawn, dist.barrier(group.handle, async_op=drawn.in_background), [])

    def coalesced(self, group: Group, drawn: Drawn) -> None:
        """Several calls as one."""
        tensors = [
            drawn.place(drawn.value((group.rank, i), (size,)), group.rank) for i, size in enumerate(drawn.counts[0])
        ]
        with dist._coalescing_manager(group.handle, async_ops=drawn.in_background) as batch:
            for tensor in tensors:
                dist.all_reduce(tensor, drawn.reduce_op, group.handle)
        wanted = [
            drawn.combined([drawn.value((q, i), tensor.shape) for q in range(group.world)])
            for i, tensor in enumerate(tensors)
        ]
        self.expect(group, drawn, batch if drawn.in_background else None, zip(tensors, wanted, strict=True))

    def functional(self, group: Group, drawn: Drawn) -> None:
        """What compiled programs call; its results wait for themselves."""
        mine, shape = drawn.input(group.rank), drawn.shape or (1,)
        total = functional.all_reduce(mine, drawn.op.lower(), group.handle)
        blocks = functional.all_gather_tensor(drawn.input(group.rank, shape), 0, group.handle)
        copies = functional.broadcast(mine, drawn.root, group.handle)
        results = [
            (total, drawn.reduced()),
            (blocks, torch.cat([drawn.value(q, shape) for q in range(group.world)])),
            (copies, drawn.value(drawn.root)),
        ]
        self.own.shuffle(results)
        for got, wanted in results:
            self.checks.equal((self.step, drawn), functional.wait_tensor(got), wanted)

    def differentiated(self, group: Group, drawn: Drawn) -> None:
        """Autograd through collectives: each has another for its backward."""
        if group.handle is not dist.group.WORLD:
            return  # torch.distributed.nn.functional takes a root of the world's
        inputs = [drawn.value(q).to(torch.float64) for q in range(group.world)]
        weights = [drawn.value((q, 1)).to(torch.float64) for q in range(group.world)]
        mine = inputs[group.rank].clone().requires_grad_()
        summed = differentiable.all_reduce(mine.clone(), group=group.handle)
        gathered = differentiable.all_gather(mine, group=group.handle)
        (summed * weights[group.rank] + sum(gathered) * weights[group.rank]).sum().backward()
        self.checks.equal((self.step, drawn, "all_reduce"), summed.detach(), sum(inputs))
        self.checks.equal((self.step, drawn, "backward"), mine.grad, 2 * sum(weights))

    def two_threads(self, group: Group, drawn: Drawn) -> None:
        """Calls on two groups at once, each on a thread of its own."""
        if group.handle is not dist.group.WORLD:
            return
        other = dist.new_group()

        def body(handle: Any, of: int) -> None:
            for i in range(6):
                tensor = drawn.place(drawn.value((group.rank, of, i)), group.rank)
                dist.all_reduce(tensor, drawn.reduce_op, handle)
                wanted = drawn.combined([drawn.value((q, of, i)) for q in range(group.world)])
                self.checks.equal((self.step, drawn, of, i), tensor, wanted)

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(body, handle, of) for of, handle in enumerate((group.handle, other))]:
                done.result()
        dist.destroy_process_group(other)

    # -- messages and objects --

    def messages(self, group: Group, drawn: Drawn) -> None:
        if group.world == 1:
            return
        lot, rank = random.Random(drawn.seed), group.rank
        pairs = [lot.sample(range(group.world), 2) for _ in range(lot.randint(1, 6))]
        as_batch, operations, results = lot.random() < 0.4, [], []
        for number, (sender, receiver) in enumerate(pairs):
            value = drawn.value((sender, receiver, number), (lot.choice((0, 1, 3000, 40_000)),))
            if rank == sender:
                tensor = drawn.place(value, rank)
                operations.append((dist.isend, tensor, receiver, number + 1))
            elif rank == receiver:
                tensor = drawn.blank(value.shape, rank)
                operations.append((dist.irecv, tensor, sender, number + 1))
            else:
                continue
            results.append((tensor, value))
        if not operations:
            return
        if as_batch:
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, tensor, group=group.handle, group_peer=peer) for op, tensor, peer, _ in operations]
            )
        else:
            self.own.shuffle(operations)  # tags tell messages apart
            works = [post(group, *operation) for operation in operations]
        self.pending.append(Pending(group, works, self.checking(drawn, results)))

    def message_of_any(self, group: Group, drawn: Drawn) -> None:
        """Everybody's to one rank, which takes them as they come; and a list of objects back."""
        everybody = [q for q in range(group.world) if q != drawn.root]
        value, tag = functools.partial(drawn.value, shape=(drawn.counts[0][0],)), 100 + self.step
        things = [drawn.root, "x" * drawn.counts[0][0]]
        if group.rank != drawn.root:
            dist.send(drawn.place(value(group.rank), group.rank), group=group.handle, tag=tag, group_dst=drawn.root)
            got: list[Any] = [None, None]
            dist.recv_object_list(got, group=group.handle, group_src=drawn.root)
            if got != things:
                self.checks.failures.append(f"{(self.step, drawn)}: objects {got}")
            return
        senders = []
        for _ in everybody:
            tensor = drawn.blank(value(0).shape, group.rank)
            sender = dist.get_group_rank(group.handle, dist.recv(tensor, group=group.handle, tag=tag))
            self.checks.equal((self.step, drawn, sender), tensor, value(sender))
            senders.append(sender)
        if sorted(senders) != everybody:
            self.checks.failures.append(f"{(self.step, drawn)}: messages of {senders}")
        for q in everybody:
            dist.send_object_list(things, group=group.handle, group_dst=q)

    def objects(self, group: Group, drawn: Drawn) -> None:
        things = [{"rank": q, "text": "x" * drawn.counts[0][q]} for q in range(group.world)]
        gathered: list[Any] = [None] * group.world
        dist.all_gather_object(gathered, things[group.rank], group.handle)
        one = [things[drawn.root] if group.rank == drawn.root else None]
        dist.broadcast_object_list(one, group=group.handle, group_src=drawn.root)
        part: list[Any] = [None]
        dist.scatter_object_list(
            part, things if group.rank == drawn.root else None, group=group.handle, group_src=drawn.root
        )
        if (gathered, one, part) != (things, [things[drawn.root]], [things[group.rank]]):
            self.checks.failures.append(f"{(self.step, drawn)}: objects {(gathered, one, part)}")

    # -- groups --

    def make_group(self) -> None:
        members = sorted(self.lot.sample(self.everyone.members, self.lot.randint(1, self.everyone.world)))
        handle = dist.new_group(members)
        self.groups.append(Group(members, handle if dist.get_rank() in members else None))

    def end_group(self) -> None:
        if len(self.groups) == 1:
            return
        group = self.groups.pop(self.lot.randrange(1, len(self.groups)))
        if group.handle is None:
            return
        for one in [one for one in self.pending if one.group is group]:
            self.finish(one)
        dist.destroy_process_group(group.handle)

    # -- results --

    def expect(self, group: Group, drawn: Drawn, work: Any, results: Any, _kept: Any = None) -> None:
        check = self.checking(drawn, list(results))
        if work is None:
            check()
        else:
            self.pending.append(Pending(group, [work], check))

    def checking(self, drawn: Drawn, results: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        step = self.step

        def check() -> None:
            for place, (got, wanted) in enumerate(results):
                self.checks.equal((step, drawn, place), got, wanted)

        return check

    def settle(self, some: int) -> None:
        for one in self.own.sample(self.pending, min(some, len(self.pending))):
            self.finish(one)

    def finish(self, one: Pending) -> None:
        """Each way in which a program can wait."""
        self.pending.remove(one)
        for work in one.works:
            way = self.own.choice(("wait", "wait", "poll", "future"))
            whole = isinstance(work, dist.Work)  # a coalesced batch can only be waited for
            while whole and way == "poll" and not work.is_completed():
                time.sleep(0.001)
            if whole and way == "future":
                work.get_future().wait()
            work.wait()
        one.check()


def post(group: Group, op: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    if op is dist.isend:
        return dist.isend(tensor, group=group.handle, tag=tag, group_dst=peer)
    return dist.irecv(tensor, group=group.handle, tag=tag, group_src=peer)


def run_programs(rank: int, world: int, seeds: range, steps: int) -> None:
    for seed in seeds:
        try:
            Program(seed).run(steps)
        except Exception as error:
            raise AssertionError(f"program {seed} at rank {rank} of {world}: {error}") from error


# --- on every place

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "2"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 60


@pytest.mark.parametrize(("world", "join"), [(1, ""), (2, ""), (3, ""), (5, ""), (2, "@mixed"), (4, "@mixed")])
def test_programs_of_torch_distributed(pool, world, join):
    pool.values(run_programs, world, range(FIRST, FIRST + PROGRAMS), STEPS, join="dist:ringlet" + join)
