"""MSCCL programs as schedules.

A program has an input, an output and scratch; a schedule has one place for each chunk, its *home*. So every value goes
home, whatever buffer it was in. Copies between buffers vanish. A message is received only when something needs it: one
that lands in scratch to be added later is received when it is added. Local additions (re) that follow each other become
one reduction, in rank order. A program that needs two values of one chunk at one time on one GPU has no schedule.

The steps are followed in one order that the waits and messages allow. Whether MSCCL may take another order is not
asked: the schedule is proved by itself, and says nothing about the threadblocks. Rounds: a message stands in the first
round that what its two sides read and write allows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from ringlet.schedule.data import Schedule
from ringlet.schedule.msccl.program import RECEIVES, SENDS, Block, Location, MscclError, Program, XmlStep, parse


def from_xml(text: str, name: str = "msccl") -> Schedule:
    """The schedule of an MSCCL-XML file, not yet proved. MscclError if the text is no program, or has no schedule.

    A schedule has one chunk a block: if the program cuts blocks into several chunks, all of them must go the same way.
    """
    program = parse(text)
    rounds = _rounds(_Steps(program).followed())
    slices = [_slice(program, rounds, part, name) for part in range(program.per_block)]
    different = len({schedule.ranks for schedule in slices})
    if different > 1:
        raise MscclError(
            f"cuts each block into {len(slices)} chunks that go {different} different ways; a schedule has one chunk a "
            "block"
        )
    return slices[0]


@dataclass(eq=False)
class _Value:
    """What a GPU has of a chunk: the value at home, `base`, and messages to add, none of which it has received yet.
    Without messages it is at home itself; without a base, the first message replaces what is there."""

    rank: int
    home: int
    base: _Value | None = None
    messages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Item:
    """A side of a message, or a copy: what a round is made of. chunk: its home; of a copy the target, from `source`."""

    verb: str
    rank: int
    chunk: int
    node: int
    source: int = -1
    sum: int = -1  # of those with the same one each is a term: they stand in one round


class _Steps:
    """Follows the steps, and collects what a schedule does instead."""

    def __init__(self, program: Program):
        self.program = program
        self.values: dict[tuple[int, Location], _Value] = {}
        self.homes: dict[tuple[int, int], _Value] = {}
        self.queues: dict[tuple[int, int, int], deque[list[tuple[int, int]]]] = defaultdict(deque)  # (message, home)
        self.at: dict[tuple[int, int], int] = {}  # (GPU, threadblock): the next step
        self.items: list[_Item] = []
        self.nodes = 0
        for rank, place, chunk in program.inputs():
            self.values[rank, place] = self.homes[rank, chunk] = _Value(rank, chunk)

    def followed(self) -> list[_Item]:
        blocks = [(rank, block) for rank, gpu in enumerate(self.program.gpus) for block in gpu]
        self.at = {(rank, block.id): 0 for rank, block in blocks}
        if len(self.at) < len(blocks):
            raise MscclError("two threadblocks of a GPU have the same id")
        while any([self.advance(rank, block) for rank, block in blocks]):
            pass
        stuck = [(rank, block) for rank, block in blocks if self.at[rank, block.id] < len(block.steps)]
        if stuck:
            raise MscclError("a deadlock: " + "; ".join(self.waiting(*one) for one in stuck[:8]))
        for rank, place, chunk in self.program.outputs():
            where = f"GPU {rank}, the result"
            result = self.value(rank, place, where)
            if result.home != chunk:
                raise MscclError(f"{where}: {place[0]}[{place[1]}] holds chunk {result.home}, and should hold {chunk}")
            self.bring_home(result, where)
        received = {item.node for item in self.items if item.verb != "send"}
        return [item for item in self.items if item.node in received]

    def advance(self, rank: int, block: Block) -> bool:
        """Follows a threadblock until it has to wait; whether it got on."""
        began = at = self.at[rank, block.id]
        while at < len(block.steps) and not self.waiting(rank, block):
            self.follow(rank, block, block.steps[at], f"GPU {rank}, threadblock {block.id}, step {at}")
            self.at[rank, block.id] = at = at + 1
        return at > began

    def waiting(self, rank: int, block: Block) -> str:
        """What the threadblock waits for; empty if for nothing."""
        at = self.at[rank, block.id]
        step, what = block.steps[at], ""
        if step.waits and self.at.get((rank, step.waits[0]), 0) <= step.waits[1]:
            what = f"threadblock {step.waits[0]}'s step {step.waits[1]}"
        elif step.kind in RECEIVES and not self.queues[block.recv, rank, block.channel]:
            what = f"a message of GPU {block.recv} on channel {block.channel}"
        return what and f"GPU {rank}, threadblock {block.id}, step {at} ({step.kind}) waits for {what}"

    def follow(self, rank: int, block: Block, step: XmlStep, where: str) -> None:
        taken: list[tuple[int, int]] = [(-1, -1)] * step.count
        if step.kind in RECEIVES:
            taken = self.queues[block.recv, rank, block.channel].popleft()
            if len(taken) != step.count:
                raise MscclError(f"{where}: receives {step.count} chunks where GPU {block.recv} sends {len(taken)}")
        sent = []
        for i, (message, home) in enumerate(taken if step.kind != "nop" else ()):
            source, target = ((buffer, offset + i) for buffer, offset in (step.source, step.target))
            made = self.made(rank, step.kind, source, target, message, home, where)
            if step.kind not in ("s", "rrs"):
                if not self.program.holds(rank, target):
                    raise MscclError(f"{where}: writes {target[0]}[{target[1]}], which is beyond the buffer")
                self.values[rank, self.program.memory(rank, target)] = made
            if step.kind in SENDS:
                self.bring_home(made, where)
                sent.append((self.add("send", rank, made.home), made.home))
        if step.kind in SENDS:
            self.queues[rank, block.send, block.channel].append(sent)

    def made(
        self, rank: int, kind: str, source: Location, target: Location, message: int, home: int, where: str
    ) -> _Value:
        """The value that a step makes, or sends, of one chunk."""
        if kind in ("r", "rcs"):
            return _Value(rank, self.home(rank, target, home), messages=[message])
        value = self.value(rank, source, where)
        if kind == "re":
            return self.sum(self.value(rank, target, where), value, where)
        if kind == "cpy":
            home = self.home(rank, target, value.home)
            if home == value.home:
                return value
            self.bring_home(value, where)
            self.add("copy", rank, home, source=value.home)
        elif kind == "s":
            return value
        else:
            self.bring_home(value, where)
            home = value.home
            self.add("reduce", rank, home, message)
        self.homes[rank, home] = copied = _Value(rank, home)
        return copied

    def home(self, rank: int, place: Location, origin: int) -> int:
        """Where a schedule keeps what is at that place: by what it is, except in an all-to-all."""
        buffer, offset = place
        if self.program.collective != "all_to_all":
            return origin
        if buffer not in "io":
            raise MscclError(f"GPU {rank}: an all-to-all that passes through scratch or other GPUs has no schedule")
        return offset + (self.program.chunks if buffer == "o" else 0)

    def value(self, rank: int, place: Location, where: str) -> _Value:
        value = self.values.get((rank, self.program.memory(rank, place)))
        if value is None:
            raise MscclError(f"{where}: no step before writes {place[0]}[{place[1]}]")
        return value

    def sum(self, own: _Value, added: _Value, where: str) -> _Value:
        if not added.messages or added.base:
            own, added = added, own
        if not added.messages or added.base:
            raise MscclError(
                f"{where}: adds two values of chunk {own.home} that the GPU both has; a schedule has one place for it"
            )
        base = own.base if own.messages else own
        both = _Value(own.rank, own.home, base, own.messages + added.messages)
        own.messages, added.messages = [], []
        return both

    def bring_home(self, value: _Value, where: str) -> None:
        """Receives the messages of the value."""
        messages = value.messages
        expected = value.base if messages else value  # None: whatever is there
        if expected and self.homes.get((value.rank, value.home)) is not expected:
            raise MscclError(
                f"{where}: needs a value of chunk {value.home} that another one has replaced; a schedule has one place "
                "for it"
            )
        if messages:
            terms = messages if value.base else messages[1:]
            if not value.base:
                self.add("recv", value.rank, value.home, messages[0])
            for message in terms:
                self.add("reduce", value.rank, value.home, message, sum=terms[0] if terms[1:] else -1)
            self.homes[value.rank, value.home] = value
            value.base, value.messages = None, []

    def add(self, verb: str, rank: int, chunk: int, node: int = -1, source: int = -1, sum: int = -1) -> int:
        """Collects an item; the number of its message or copy, a new one if it begins there."""
        if node < 0:
            node, self.nodes = self.nodes, self.nodes + 1
        self.items.append(_Item(verb, rank, chunk, node, source, sum))
        return node


def _rounds(items: list[_Item]) -> list[tuple[int, _Item]]:
    """(round, item) for each: the least rounds that keep what each rank reads and writes in order."""
    after: dict[int, list[tuple[int, int]]] = defaultdict(list)  # node -> (later node, rounds between)
    writer: dict[tuple[int, int], _Item] = {}
    readers: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)
    for item in items:
        places = [(item.chunk, item.verb == "send")]
        if item.verb == "copy":
            places.insert(0, (item.source, True))
        for chunk, reads in places:
            key = (item.rank, chunk)
            before = writer.get(key)
            if before and before.sum == item.sum >= 0:
                after[before.node].append((item.node, 0))
                after[item.node].append((before.node, 0))
            elif before:
                after[before.node].append((item.node, 1))
            if reads:
                readers[key].append((item.node, item.verb == "copy"))
                continue
            for node, copies in readers.pop(key, []):
                # What is added may be sent in the same round: a round's reads see what was there before it.
                after[node].append((item.node, 0 if item.verb == "reduce" and not copies else 1))
            writer[key] = item
    levels = dict.fromkeys((item.node for item in items), 0)
    ready = list(levels)
    while ready:
        moved: list[int] = []
        for node in ready:
            for later, between in after[node]:
                if levels[later] < levels[node] + between:
                    levels[later] = levels[node] + between
                    moved.append(later)
        ready = list(dict.fromkeys(moved))
        if ready and max(levels[node] for node in ready) > len(levels):
            raise MscclError("runs only as long as sends are buffered: messages wait for each other in a circle")
    return [(levels[item.node], item) for item in items]


def _slice(program: Program, rounds: list[tuple[int, _Item]], part: int, name: str) -> Schedule:
    """The schedule of each block's chunk number `part`."""
    k = program.per_block
    sends: dict[int, tuple[int, int]] = {}  # message -> its sender, and the chunk
    ends: list[tuple[int, _Item]] = []
    for level, item in rounds:
        if item.chunk % k == part and item.verb == "send":
            sends[item.node] = item.rank, item.chunk // k
        elif item.chunk % k == part:
            ends.append((level, item))
            sends.setdefault(item.node, (item.rank, item.source // k))
    transfers = [(level, sends[i.node][0], i.rank, i.verb, sends[i.node][1], i.chunk // k) for level, i in ends]
    # Sorted, both sides of all messages take them in one order; neighbouring chunks go together.
    merged: list[list[Any]] = []
    for *way, first, to in sorted(transfers):
        last = merged[-1] if merged else []
        if last and last[:4] == way and (last[4] + last[6], last[5] + last[6]) == (first, to):
            last[6] += 1
        else:
            merged.append([*way, first, to, 1])
    by_rank: list[dict[int, list[tuple[str, int, int, int]]]] = [defaultdict(list) for _ in range(program.world)]
    for level, source, target, verb, first, to, count in merged:
        if verb == "copy":
            by_rank[source][level].append((verb, to, first, count))
        else:
            by_rank[source][level].append(("send", target, first, count))
            by_rank[target][level].append((verb, source, to, count))
    ranks = [
        [sorted(levels[level], key=lambda step: step[0] != "send") for level in sorted(levels)] for levels in by_rank
    ]
    return Schedule.from_steps(program.collective, program.parts, ranks, algorithm=name)
