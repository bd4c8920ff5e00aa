"""One run of an MSCCL program as its executor would do it, with what it does to each chunk, and its races.

Threadblocks run their steps in order; sends are buffered; messages between two threadblocks of a channel keep their
order. A threadblock posts its flag after the steps with hasdep=1; a wait ends when the flag has reached its step. Each
step becomes operations on single chunks, in an order in which they can happen. Two threadblocks of a GPU that touch one
place, one of them writing, must be in an order that program, dependencies or messages impose: vector clocks tell
(Mattern; FastTrack, Flanagan and Freund, PLDI 2009). If they are not, the program is wrong: a race.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field

from ringlet.schedule.msccl.program import (
    READS,
    RECEIVES,
    SENDS,
    WRITES,
    Block,
    Location,
    MscclError,
    Program,
    XmlStep,
)

Clock = dict[int, int]  # threadblock (counted over all GPUs) -> steps of it that are over


@dataclass(frozen=True, slots=True)
class Operation:
    """On one chunk. kind: send, recv, copy, reduce (target = source + message) or fold (target += source)."""

    kind: str
    rank: int
    source: Location | None
    target: Location | None
    message: int  # -1: none
    step: str  # "GPU 0, threadblock 1, step 2"


@dataclass
class _Place:
    """Who touched a chunk last: (threadblock, step, words) of the writer, and of each reader since."""

    writer: tuple[int, int, str] | None = None
    readers: dict[int, tuple[int, str]] = field(default_factory=dict)


def run(program: Program) -> list[Operation]:
    """The operations of all GPUs in an order in which they can happen. MscclError on a deadlock or a race, and if
    messages do not match, or an operation uses a chunk that no operation wrote."""
    return _Run(program).run()


class _Run:
    def __init__(self, program: Program):
        self.program = program
        self.blocks = [(rank, block) for rank, gpu in enumerate(program.gpus) for block in gpu]
        self.numbers = {(rank, block.id): i for i, (rank, block) in enumerate(self.blocks)}
        self.at = [0] * len(self.blocks)
        self.clocks: list[Clock] = [{} for _ in self.blocks]
        self.ends: dict[tuple[int, int], Clock] = {}  # of steps that others wait for
        posted = [_posted(block) for _, block in self.blocks]
        self.goals: dict[tuple[int, tuple[int, int]], tuple[int, int]] = {}  # (GPU, wait) -> the step that ends it
        for rank, block in self.blocks:
            for waits in (step.waits for step in block.steps if step.waits):
                other = self.numbers.get((rank, waits[0]), -1)
                later = posted[other] if other >= 0 else []
                at = bisect_left(later, (waits[1], -1))
                if at < len(later):
                    self.goals[rank, waits] = other, later[at][1]
        self.waited = set(self.goals.values())
        self.queues: dict[tuple[int, int, int], deque[tuple[list[int], Clock]]] = defaultdict(deque)
        self.places: dict[tuple[int, Location], _Place] = defaultdict(_Place)
        self.operations: list[Operation] = []
        self.messages = 0

    def run(self) -> list[Operation]:
        ready = deque(range(len(self.blocks)))
        while ready:
            moved = [number for number in ready if self.advance(number)]
            if not moved:
                break
            ready = deque(n for n, (_, block) in enumerate(self.blocks) if self.at[n] < len(block.steps))
        stuck = [n for n, (_, block) in enumerate(self.blocks) if self.at[n] < len(block.steps)]
        if stuck:
            self.refuse_deadlock(stuck[0])
        left = next(((key, queue) for key, queue in self.queues.items() if queue), None)
        if left:
            (source, target, channel), queue = left
            raise MscclError(
                f"GPU {source} sends {len(queue)} more to GPU {target} on channel {channel} than it receives"
            )
        return self.operations

    def advance(self, number: int) -> bool:
        """Runs the steps of a threadblock until one has to wait; whether any ran."""
        rank, block = self.blocks[number]
        began = self.at[number]
        while self.at[number] < len(block.steps) and self.can(rank, block, block.steps[self.at[number]]):
            self.step(number, block.steps[self.at[number]])
        return self.at[number] > began

    def can(self, rank: int, block: Block, step: XmlStep) -> bool:
        if self.held(rank, step):
            return False
        return step.kind not in RECEIVES or bool(self.queues[block.recv, rank, block.channel])

    def held(self, rank: int, step: XmlStep) -> bool:
        """Whether the step still waits for another threadblock's flag."""
        if step.waits is None:
            return False
        other, index = self.goals.get((rank, step.waits), (-1, -1))
        return other < 0 or self.at[other] <= index

    def step(self, number: int, step: XmlStep) -> None:
        rank, block = self.blocks[number]
        index = self.at[number]
        words = f"GPU {rank}, threadblock {block.id}, step {index}"
        clock = self.clocks[number]
        if step.waits:
            _join(clock, self.ends[self.goals[rank, step.waits]])
        taken: list[int] = []
        if step.kind in RECEIVES:
            taken, sent_at = self.queues[block.recv, rank, block.channel].popleft()
            _join(clock, sent_at)
            if len(taken) != step.count:
                raise MscclError(f"{words}: receives {step.count} chunks where GPU {block.recv} sends {len(taken)}")
        clock[number] = index + 1
        given = [
            self.chunk(rank, step, i, taken[i] if taken else -1, (number, index, words)) for i in range(step.count)
        ]
        if step.kind in SENDS:
            self.queues[rank, block.send, block.channel].append((given, dict(clock)))
        self.at[number] = index + 1
        if (number, index) in self.waited:
            self.ends[number, index] = dict(clock)

    def chunk(self, rank: int, step: XmlStep, i: int, message: int, by: tuple[int, int, str]) -> int:
        """The operations of a step on its i-th chunk; the number of the message that it sends, -1 for none."""
        kind = step.kind
        source, target = (self.program.memory(rank, _moved(place, i)) for place in (step.source, step.target))
        add = self.operations.append
        if kind == "nop":
            return -1
        if kind == "rrs":
            target = ("held", len(self.operations))  # no other operation holds it
        if kind in READS:
            self.read(rank, source, by)
        if kind == "re":
            self.read(rank, target, by)
        if kind in WRITES or kind == "rrs":
            self.write(rank, target, by)
        if kind in ("r", "rcs"):
            add(Operation("recv", rank, None, target, message, by[2]))
        elif kind in ("rrs", "rrc", "rrcs"):
            add(Operation("reduce", rank, source, target, message, by[2]))
        elif kind in ("cpy", "re"):
            add(Operation("copy" if kind == "cpy" else "fold", rank, source, target, -1, by[2]))
        if kind not in SENDS:
            return -1
        self.messages += 1
        add(Operation("send", rank, source if kind == "s" else target, None, self.messages - 1, by[2]))
        return self.messages - 1

    def read(self, rank: int, place: Location, by: tuple[int, int, str]) -> None:
        number, index, words = by
        seen = self.places[rank, place]
        self.require_order(seen.writer, place, by)
        seen.readers[number] = (index, words)

    def write(self, rank: int, place: Location, by: tuple[int, int, str]) -> None:
        seen = self.places[rank, place]
        self.require_order(seen.writer, place, by)
        for number, (index, words) in seen.readers.items():
            self.require_order((number, index, words), place, by)
        seen.writer, seen.readers = by, {}

    def require_order(self, other: tuple[int, int, str] | None, place: Location, by: tuple[int, int, str]) -> None:
        if other is None or other[0] == by[0] or self.clocks[by[0]].get(other[0], 0) > other[1]:
            return
        touched, later = f"{place[0]}[{place[1]}]", by[2].partition(", ")[2]
        text = f"a race: {other[2]} and {later} both touch {touched}, and nothing says which first"
        raise MscclError(text)

    def refuse_deadlock(self, number: int) -> None:
        """Follows the chain of waits to a threadblock that is in it already, or that has no more steps."""
        path: list[int] = []
        while number >= 0 and number not in path:
            path.append(number)
            number = self.waits_for(number)
        lines = []
        for n in path[path.index(number) :] if number in path else path:
            rank, block = self.blocks[n]
            step = block.steps[self.at[n]]
            what = f"a message of GPU {block.recv} on channel {block.channel}"
            if step.waits and self.held(rank, step):
                what = f"threadblock {step.waits[0]}'s step {step.waits[1]}"
                if (rank, step.waits) not in self.goals:
                    what += ', but no step with hasdep="1" stands there or later'
            lines.append(f"GPU {rank}, threadblock {block.id}, step {self.at[n]} ({step.kind}) waits for {what}")
        raise MscclError("a deadlock: " + "; ".join(lines[:8]))

    def waits_for(self, number: int) -> int:
        """The threadblock that this one waits for; -1 if there is none, or it has run out of steps that help."""
        rank, block = self.blocks[number]
        step = block.steps[self.at[number]]
        if step.waits and self.held(rank, step):
            other = self.goals.get((rank, step.waits), (-1, -1))[0]
        else:
            senders = (
                n
                for n, (r, b) in enumerate(self.blocks)
                if (r, b.send, b.channel) == (block.recv, rank, block.channel) and self.at[n] < len(b.steps)
            )
            other = next(senders, -1)
        return other if other >= 0 and self.at[other] < len(self.blocks[other][1].steps) else -1


def _posted(block: Block) -> list[tuple[int, int]]:
    """(value, step) of each flag that the executor posts. It posts none after a nop, and counts no nop that does not
    wait."""
    posted, skipped = [], 0
    for index, step in enumerate(block.steps):
        skipped += step.kind == "nop" and step.waits is None
        if step.posts and step.kind != "nop":
            posted.append((index - skipped, index))
    return posted


def _join(clock: Clock, other: Clock) -> None:
    for number, steps in other.items():
        if steps > clock.get(number, 0):
            clock[number] = steps


def _moved(place: Location, i: int) -> Location:
    return place[0], place[1] + i
