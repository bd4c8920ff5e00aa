"""A schedule as plain data: steps in rounds for every rank, and the error of one that is wrong.

Source of the verbs: csrc/schedule/step.h. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlet.schedule.collectives import input_chunks, output_chunks
from ringlet.schedule.hosts import described

if TYPE_CHECKING:
    from ringlet.schedule.cost import Cost
    from ringlet.schedule.machine_file import Machine
    from ringlet.schedule.prove import Proof

RANKS_IN_REPR = 8
VERBS = ("send", "recv", "reduce", "copy")
MOST_PARTS, MOST_ROUNDS = 1 << 14, 1 << 15  # that an engine takes (csrc/engine/authored.h)
MOST_STEPS = 1 << 20  # of one round; more than any that ends has


class ScheduleError(ValueError):
    """A schedule does not compute its collective.

    `rank`, `round` and `chunk` say where (None if there is none, e.g. a chunk in a barrier). `schedule` is the name of
    the schedule, e.g. "ring all_reduce, world 3", when the prover knows it.
    """

    def __init__(self, rank: int, round: int | None, chunk: int | None, message: str):
        super().__init__(rank, round, chunk, message)
        self.rank = rank
        self.round = round
        self.chunk = chunk
        self.message = message
        self.schedule = ""

    def __str__(self) -> str:
        place = f"rank {self.rank}"
        place += ", before any round" if self.round is None else f", round {self.round}"
        place += "" if self.chunk is None else f", chunk {self.chunk}"
        return f"{self.schedule}: {place}: {self.message}" if self.schedule else f"{place}: {self.message}"


@dataclass(frozen=True, slots=True)
class Step:
    """A verb on chunks [first, first + count): "send", "recv", "reduce" or "copy", whose `peer` is the first target."""

    verb: str
    peer: int
    first: int
    count: int

    @property
    def chunks(self) -> range:
        return range(self.first, self.first + self.count)

    def __str__(self) -> str:
        if self.verb == "copy":
            return f"copy {_chunks(self.first, self.count)} to {_chunks(self.peer, self.count)}"
        return f"{self.verb} {_chunks(self.first, self.count)} {'to' if self.verb == 'send' else 'from'} {self.peer}"


def send(peer: int, chunk: int, count: int = 1) -> Step:
    """Gives chunks [chunk, chunk + count), as they stood before the round, to rank `peer`."""
    return Step("send", peer, chunk, count)


def recv(peer: int, chunk: int, count: int = 1) -> Step:
    """Overwrites chunks [chunk, chunk + count) by what rank `peer` sends."""
    return Step("recv", peer, chunk, count)


def reduce(peer: int, chunk: int, count: int = 1) -> Step:
    """Combines chunks [chunk, chunk + count) with what rank `peer` sends; in one round in ascending rank order."""
    return Step("reduce", peer, chunk, count)


def copy(chunk: int, target: int, count: int = 1) -> Step:
    """Local: chunks [target, target + count) become what chunks [chunk, chunk + count) were before the round."""
    return Step("copy", target, chunk, count)


@dataclass(frozen=True, slots=True)
class Round:
    """Steps that begin and complete together. All their reads see the values from before the round."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))


@dataclass(frozen=True, repr=False)
class Schedule:
    """All ranks' rounds of one collective. `inputs[r]` and `outputs[r]` are rank r's (first chunk, count).

    `hosts[r]` is the number of rank r's host, for which the schedule was made; empty: one host.
    """

    algorithm: str
    collective: str
    world: int
    root: int
    parts: int
    ranks: tuple[tuple[Round, ...], ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "hosts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))

    @classmethod
    def of_rounds(
        cls,
        collective: str,
        parts: int,
        ranks: Sequence[Sequence[Round]],
        root: int = 0,
        algorithm: str = "hand-made",
        hosts: tuple[int, ...] = (),
    ) -> Schedule:
        """A schedule whose inputs and outputs are those of its collective."""
        world = len(ranks)
        places = [(collective, rank, world, root, parts) for rank in range(world)]
        inputs = tuple(input_chunks(*place) for place in places)
        outputs = tuple(output_chunks(*place) for place in places)
        return cls(algorithm, collective, world, root, parts, tuple(map(tuple, ranks)), inputs, outputs, hosts)

    @classmethod
    def from_steps(
        cls,
        collective: str,
        parts: int,
        ranks: Sequence[Iterable[Iterable[tuple[str, int, int, int]]]],
        root: int = 0,
        algorithm: str = "hand-made",
        hosts: tuple[int, ...] = (),
    ) -> Schedule:
        """A schedule made by hand: `ranks[r]` is a list of rounds of (verb, peer, first, count)."""
        rounds = [[Round(tuple(Step(*step) for step in steps)) for steps in rank] for rank in ranks]
        return cls.of_rounds(collective, parts, rounds, root, algorithm, hosts)

    @property
    def name(self) -> str:
        return title(self.algorithm, self.collective, self.world, self.root, self.hosts)

    @property
    def rounds(self) -> int:
        """The largest number of rounds of any rank."""
        return max(map(len, self.ranks), default=0)

    if TYPE_CHECKING:  # ringlet.schedule, which stands above all that these need, binds them

        def prove(self) -> Proof:
            """See ringlet.schedule.prove.prove."""

        def cost(self, nbytes: float, machine: Machine = ...) -> Cost:
            """See ringlet.schedule.cost.cost."""

        def svg(self) -> str:
            """The picture as an SVG document; see ringlet.schedule.draw."""

        def text(self) -> str:
            """The picture in characters; see ringlet.schedule.draw."""

        def json(self) -> str:
            """The schedule as a JSON file, which `ringlet.schedule.load` reads; see ringlet.schedule.files."""

        def xml(self) -> str:
            """The schedule as MSCCL-XML. Raises ValueError for gather, scatter, barrier, and a root other than 0."""

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.parts} part{'s' * (self.parts != 1)}, {self.rounds} rounds"]
        for rank, rounds in enumerate(self.ranks[:RANKS_IN_REPR]):
            lines.append(f"  rank {rank}: " + (" | ".join(map(str, rounds)) or "nothing"))
        if self.world > RANKS_IN_REPR:
            lines.append(f"  ... and {self.world - RANKS_IN_REPR} more ranks")
        return "\n".join(lines)


def _chunks(first: int, count: int) -> str:
    return f"[{first}]" if count == 1 else f"[{first}:{first + count}]"


def title(algorithm: str, collective: str, world: int, root: int, hosts: Sequence[int]) -> str:
    """The name of a schedule: "ring all_reduce, world 3"."""
    on_hosts = described(hosts)
    return (
        f"{algorithm} {collective}, world {world}{f', root {root}' if root else ''}{', ' if on_hosts else ''}{on_hosts}"
    )
