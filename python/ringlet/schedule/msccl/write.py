"""Schedules as MSCCL-XML.

A GPU has one threadblock for each rank that it sends to, one for each that it receives from, and one for local work. A
step waits for all steps of other threadblocks that touched its chunks before, in the order of the rounds. If a round
reduces several messages into one chunk, they go to scratch first, and local additions in rank order follow: otherwise
every GPU would begin with its own contribution, and the GPUs would get different bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

from ringlet.schedule.data import MOST_PARTS, Round, Schedule, Step
from ringlet.schedule.messages import messages_of
from ringlet.schedule.msccl.program import COLLECTIVES, Location, MscclError

_NOWHERE: Location = ("i", -1)
_LOCAL = (-1, -1)
_ORDER = {"send": 0, "copy": 1}  # in a round; then all that writes, in the order of the messages

Peers = tuple[int, int]  # of a threadblock: the rank it sends to, the rank it receives from


def to_xml(schedule: Schedule) -> str:
    """The schedule as the text of an MSCCL-XML file. Raises MscclError for a collective or a root that MSCCL lacks, and
    ScheduleError for steps that no rank can do."""
    names = {ours: theirs for theirs, ours in reversed(COLLECTIVES.items())}
    if schedule.collective not in names or schedule.root:
        known = ", ".join(names)
        raise MscclError(f"{schedule.name}: MSCCL-XML has {known}, with root 0, and nothing else: write FILE.json")
    messages_of(schedule)
    moves = schedule.collective != "all_to_all"
    algo = ElementTree.Element(
        "algo", name=schedule.algorithm, proto="Simple", nchannels="1", coll=names[schedule.collective],
        nchunksperloop=str(schedule.parts if moves else schedule.world), ngpus=str(schedule.world),
        inplace=str(int(moves)), outofplace=str(int(not moves)), minBytes="0", maxBytes=str(1 << 40),
    )  # fmt: skip
    for rank in range(schedule.world):
        algo.append(_Gpu(schedule, rank).element())
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, encoding="unicode") + "\n"


@dataclass
class _Place:
    """Who touched a chunk: the writer, and its readers since; each as (threadblock, step)."""

    writer: tuple[Peers, int] | None = None
    readers: list[tuple[Peers, int]] = field(default_factory=list)


@dataclass
class _XmlStep:
    kind: str
    source: Location = _NOWHERE
    target: Location = _NOWHERE
    count: int = 1
    waits: tuple[Peers, int] | None = None


class _Gpu:
    def __init__(self, schedule: Schedule, rank: int):
        self.schedule = schedule
        self.rank = rank
        self.blocks: dict[Peers, list[_XmlStep]] = defaultdict(list)
        self.places: dict[Location, _Place] = defaultdict(_Place)
        self.scratch = 0
        for round in schedule.ranks[rank]:
            self.add_round(round)

    def add_round(self, round: Round) -> None:
        steps = list(self.cut(round))
        terms: dict[int, list[tuple[int, Location | None]]] = defaultdict(list)  # by chunk: (rank, its location)
        for step in steps:
            for chunk in step.chunks if step.verb == "reduce" else ():
                terms[chunk].append((step.peer, None))
        several = {chunk: [(self.rank, self.place(chunk))] for chunk, found in terms.items() if len(found) > 1}
        free = 0
        # A round's reads see what was there before it.
        for step in sorted(steps, key=lambda step: _ORDER.get(step.verb, len(_ORDER))):
            place = self.place(step.first)
            if step.verb == "send":
                self.add((step.peer, -1), _XmlStep("s", source=place, count=step.count))
            elif step.verb == "copy":
                self.add(_LOCAL, _XmlStep("cpy", place, self.place(step.peer), step.count))
            elif step.verb == "recv":
                self.add((-1, step.peer), _XmlStep("r", target=place, count=step.count))
            elif several.keys().isdisjoint(step.chunks):
                self.add((-1, step.peer), _XmlStep("rrc", place, place, step.count))
            else:
                self.add((-1, step.peer), _XmlStep("r", target=("s", free), count=step.count))
                for chunk in step.chunks:
                    several.setdefault(chunk, [(self.rank, self.place(chunk))]).append((step.peer, ("s", free)))
                    free += 1
        self.scratch = max(self.scratch, free)
        if free > MOST_PARTS:
            raise MscclError(
                f"{self.schedule.name}: needs {free} chunks of scratch; a program has at most {MOST_PARTS}"
            )
        for chunk, found in several.items():
            self.add_sum(self.place(chunk), [where for _, where in sorted(found)])

    def cut(self, round: Round) -> Iterator[Step]:
        """The steps that move chunks; an all-to-all's chunk by chunk, because its chunks lie in two buffers."""
        for step in (step for step in round.steps if step.count):
            if self.schedule.collective != "all_to_all":
                yield step
            else:
                peers = range(step.peer, step.peer + step.count) if step.verb == "copy" else [step.peer] * step.count
                yield from (Step(step.verb, peer, chunk, 1) for peer, chunk in zip(peers, step.chunks, strict=True))

    def place(self, chunk: int) -> Location:
        if self.schedule.collective == "all_to_all" and chunk >= self.schedule.world:
            return "o", chunk - self.schedule.world
        return "o" if self.schedule.collective == "all_gather" else "i", chunk

    def add_sum(self, result: Location, terms: list[Location]) -> None:
        """Adds the terms in their order, which the first two may change, into the result, which is one of them."""
        into = result if result in terms[:2] else terms[0]
        rest = [term for term in terms if term != into]
        for term in rest:
            self.add(_LOCAL, _XmlStep("re", term, into))
        if into != result:
            self.add(_LOCAL, _XmlStep("cpy", into, result))

    def add(self, peers: Peers, step: _XmlStep) -> None:
        """Appends the step to its threadblock, after what it has to wait for."""
        block = self.blocks[peers]
        read = [(step.source[0], step.source[1] + i) for i in range(step.count) if step.source != _NOWHERE]
        written = [(step.target[0], step.target[1] + i) for i in range(step.count) if step.target != _NOWHERE]
        if step.kind == "re":
            read += written
        before = [self.places[place].writer for place in (*read, *written)]
        for place in written:
            before += self.places[place].readers
        last: dict[Peers, int] = {}
        for other, index in (one for one in before if one and one[0] != peers):
            last[other] = max(last.get(other, 0), index)
        waits = list(last.items())
        block += [_XmlStep("nop", count=0, waits=one) for one in waits[:-1]]
        step.waits = waits[-1] if waits else None
        block.append(step)
        now = (peers, len(block) - 1)
        for place in read:
            self.places[place].readers.append(now)
        for place in written:
            self.places[place] = _Place(now)

    def element(self) -> ElementTree.Element:
        collective, world = self.schedule.collective, self.schedule.world
        sizes = {"all_gather": (0, world), "all_to_all": (world, world)}.get(collective, (self.schedule.parts, 0))
        gpu = ElementTree.Element("gpu", id=str(self.rank))
        for buffer, size in zip("ios", (*sizes, self.scratch), strict=True):
            gpu.set(f"{buffer}_chunks", str(size))
        numbers = {peers: number for number, peers in enumerate(sorted(self.blocks, reverse=True))}
        awaited = {step.waits for block in self.blocks.values() for step in block if step.waits}
        for peers, number in numbers.items():
            tb = ElementTree.SubElement(gpu, "tb", id=str(number), send=str(peers[0]), recv=str(peers[1]), chan="0")
            for index, step in enumerate(self.blocks[peers]):
                waits = (numbers[step.waits[0]], step.waits[1]) if step.waits else (-1, -1)
                ElementTree.SubElement(
                    tb, "step", s=str(index), type=step.kind, srcbuf=step.source[0], srcoff=str(step.source[1]),
                    dstbuf=step.target[0], dstoff=str(step.target[1]), cnt=str(step.count), depid=str(waits[0]),
                    deps=str(waits[1]), hasdep=str(int((peers, index) in awaited)),
                )  # fmt: skip
        return gpu
