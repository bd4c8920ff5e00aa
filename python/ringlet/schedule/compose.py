"""All-reduces put together from smaller ones: one algorithm inside each host and another across the hosts.

`inside+across`, e.g. "two_shot+ring", scatters sums inside each host, all-reduces each rank's shard among the ranks of
its index on all hosts, and gathers inside. `leader.inside+across` reduces to one rank of each host, all-reduces among
those and broadcasts: fewer messages between hosts, more bytes in each. `segmented` makes a schedule a pipeline. All
give flat schedules that `prove` proves. Source: the 2D-torus all-reduce of Mikami et al., arXiv 1811.05233, for any
two algorithms; hierarchical MPI libraries for leaders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ringlet.schedule.collectives import DIVIDED
from ringlet.schedule.data import MOST_PARTS, Round, Schedule, Step
from ringlet.schedule.execution import execute
from ringlet.schedule.hosts import numbered, ranks_by_host
from ringlet.schedule.registry import Algorithm, algorithms, schedule

_LEADER = "leader."
_ON_HOSTS = ("hierarchical",)  # uses the hosts itself, so it is no part of a composition


@dataclass(frozen=True)
class Composition:
    """The algorithms inside a host and across hosts. `leaders`: across through one rank of each host, not all ranks."""

    inside: str
    across: str
    leaders: bool = False

    @property
    def name(self) -> str:
        return f"{_LEADER if self.leaders else ''}{self.inside}+{self.across}"

    def schedule(self, hosts: Sequence[int]) -> Schedule:
        """The all-reduce on these hosts; ValueError if hosts have different numbers of ranks, or a name is wrong."""
        on_host = ranks_by_host(hosts)
        size = len(on_host[0])
        if any(len(ranks) != size for ranks in on_host):
            raise ValueError(f"{self.name}: a composition needs the same number of ranks on every host")
        first, last = ("reduce", "broadcast") if self.leaders else ("reduce_scatter", "all_gather")
        into, out = (schedule(self.inside, collective, world=size) for collective in (first, last))
        between = schedule(self.across, world=len(on_host))
        ranks: list[tuple[Round, ...]] = [()] * len(hosts)
        for host, locals_ in enumerate(on_host):
            for index, rank in enumerate(locals_):
                counterparts = [there[index] for there in on_host]
                rounds = [*_embedded(into.ranks[index], locals_, 0, between.parts)]
                if self.leaders and index == 0:
                    rounds += _embedded(between.ranks[host], counterparts, 0, into.parts)
                elif not self.leaders:
                    rounds += _embedded(between.ranks[host], counterparts, index * between.parts, 1)
                ranks[rank] = (*rounds, *_embedded(out.ranks[index], locals_, 0, between.parts))
        parts = into.parts * between.parts
        placed = numbered(hosts) if len(on_host) > 1 else ()
        return Schedule.of_rounds("all_reduce", parts, ranks, algorithm=self.name, hosts=placed)


def compositions(own: Iterable[Algorithm] = ()) -> Iterator[Composition]:
    """All compositions of built-in algorithms and of these."""
    known: dict[str, list[str]] = defaultdict(list)
    names = [(name, collective) for name, collective, _ in algorithms()]
    for name, collective in names + [(one.name, one.collective) for one in own]:
        if name not in _ON_HOSTS:
            known[collective].append(name)
    for across in known["all_reduce"]:
        for inside in known["reduce_scatter"]:
            if inside in known["all_gather"]:
                yield Composition(inside, across)
        for inside in known["reduce"]:
            if inside in known["broadcast"]:
                yield Composition(inside, across, leaders=True)


def segmented(whole: Schedule, segments: int) -> Schedule:
    """The schedule as a pipeline of `segments` equal pieces, each a moment behind the one before it.

    ValueError if rounds cannot express that: the collective has blocks, or a rank's round takes longer than that of a
    rank with which it exchanges messages in it; or if the schedule would have too many parts.
    """
    if not 1 <= segments <= MOST_PARTS // whole.parts:
        raise ValueError(f"{whole.name}: can be cut into 1 to {MOST_PARTS // whole.parts} segments, got {segments}")
    if whole.collective not in DIVIDED:
        raise ValueError(f"{whole.collective} has blocks; only {', '.join(DIVIDED)} can be cut into segments")
    moments, everyone = _moments(whole), range(whole.world)
    ranks = []
    for rank, rounds in enumerate(whole.ranks):
        by_moment: dict[int, list[Step]] = defaultdict(list)
        for index, round_ in enumerate(rounds):
            for segment in range(segments):
                by_moment[moments[rank][index] + segment] += _moved(round_, everyone, segment * whole.parts, 1)
        ranks.append(tuple(Round(tuple(by_moment[moment])) for moment in sorted(by_moment)))
    name = f"{whole.algorithm}.{segments}"
    return Schedule.of_rounds(whole.collective, whole.parts * segments, ranks, whole.root, name, whole.hosts)


def _embedded(rounds: Sequence[Round], ranks: Sequence[int], first: int, width: int) -> Iterator[Round]:
    """A smaller world's rounds among `ranks`, each of its chunks `width` chunks from `first` on."""
    return (Round(tuple(_moved(round_, ranks, first, width))) for round_ in rounds)


def _moved(round_: Round, ranks: Sequence[int], first: int, width: int) -> Iterator[Step]:
    for step in round_.steps:
        peer = first + step.peer * width if step.verb == "copy" else ranks[step.peer]
        yield Step(step.verb, peer, first + step.first * width, step.count * width)


def _moments(whole: Schedule) -> list[dict[int, int]]:
    """By rank and round, the moment of the zero-buffer execution at which its messages pass."""
    moments: list[dict[int, int]] = [{} for _ in range(whole.world)]
    for message, moment in execute(whole).moments.items():
        for rank, index in ((message.source, message.source_round), (message.target, message.target_round)):
            if moments[rank].setdefault(index, moment) != moment:
                raise ValueError(f"{whole.name}: rank {rank} passes messages at different moments of its round {index}")
    for rank, rounds in enumerate(whole.ranks):
        if len(moments[rank]) < len(rounds):
            raise ValueError(f"{whole.name}: rank {rank} has a round without messages")
    return moments
