"""A user's own algorithms: a pure function of a rank's place yields rounds, and every engine runs these rounds.

    import ringlet
    from ringlet.schedule import recv, reduce, send

    @ringlet.algorithm("all_reduce", name="mine")
    def mine(rank, world):
        following, before = (rank + 1) % world, (rank - 1) % world
        for i in range(world - 1):
            yield send(following, (rank - 1 - i) % world), reduce(before, (rank - 2 - i) % world)
        for i in range(world - 1):
            yield send(following, (rank - i) % world), recv(before, (rank - 1 - i) % world)

After that, algorithm="mine" (or the object) is an algorithm like any other. A group proves it for its own world before
the first call (ringlet/agreement.py). `load` takes a file. Source of the verbs: csrc/schedule/step.h. No torch here.
"""

from __future__ import annotations

import inspect
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringlet.errors import InvalidUsage
from ringlet.schedule.collectives import (
    BLOCKED,
    COLLECTIVES,
    ROOTED,
    input_chunks,
    output_chunks,
    required_parts,
)
from ringlet.schedule.hosts import numbered
from ringlet.schedule.packed import packed, unpacked
from ringlet.schedule.steps import Round, Schedule, ScheduleError, Step

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]{0,62}")
RESERVED = ("auto", "none", "nccl")
ORDERS = ("none", "along", "across")
PLACE = ("rank", "world", "root", "hosts")  # the parameters that a function may have

Rounds = Iterable[Step | Iterable[Step]]
Parts = int | Callable[[int], int] | None


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A user's own algorithm, as `ringlet.algorithm` makes it. Calls take it, or its name, as `algorithm=`.

    function: yields the rounds of one rank.
    parts: the number of chunks into which a divided collective cuts its buffer, or a function of the world that gives
    this number; None: the world.
    order: which rank stands at which position (docs/algorithms.md, "Along the topology").
    origin: file and line of the function, "mine.py:12".
    Immutable; any thread may use it.
    """

    collective: str
    name: str
    function: Callable[..., Rounds]
    parts: Parts = None
    order: str = "none"
    summary: str = ""
    origin: str = ""
    slot: int = field(default=-1, repr=False)  # its number in the core

    def __call__(self, *place: Any, **named: Any) -> Rounds:
        """The function itself."""
        return self.function(*place, **named)

    def schedule(self, world: int, root: int = 0, hosts: Sequence[int] | None = None) -> Schedule:
        """The schedule of all ranks, not yet proved.

        hosts[r]: any number for rank r's host (None: all share one). Raises InvalidUsage for a wrong world, root or
        hosts, NotImplementedError if the function does (it does not cover this world), and ScheduleError if the
        function raises anything else or yields something that is no round.
        """
        _check_place(self.collective, world, root, hosts)
        on_hosts = numbered(hosts) if hosts is not None else (0,) * world
        if self.order != "none" and len(set(on_hosts)) > 1:
            return self._ordered(world, root, on_hosts)
        ranks = tuple(self._rounds(rank, world, root, on_hosts) for rank in range(world))
        return assembled(self, ranks, self.parts_of(world), root, on_hosts)

    def parts_of(self, world: int) -> int:
        """The number of chunks of the schedule's buffer."""
        needed = required_parts(self.collective, world)
        if needed is not None:
            return needed
        try:
            parts = self.parts(world) if callable(self.parts) else self.parts
            return operator.index(world if parts is None else parts)
        except Exception as error:
            raise ScheduleError(0, None, None, f"parts {_raised(error)}") from error

    def _rounds(self, rank: int, world: int, root: int, hosts: tuple[int, ...]) -> tuple[Round, ...]:
        place = dict(zip(PLACE, (rank, world, root, hosts), strict=True))
        wanted = {name: place[name] for name in _asked_for(self.function)}
        rounds: list[Round] = []
        try:
            for yielded in self.function(**wanted) or ():
                rounds.append(_round(rank, len(rounds), yielded))
        except (NotImplementedError, ScheduleError):
            raise
        except Exception as error:
            raise ScheduleError(rank, len(rounds), None, _raised(error)) from error
        return tuple(rounds)

    def _ordered(self, world: int, root: int, hosts: tuple[int, ...]) -> Schedule:
        """Makes the schedule for positions. Ranks take these host after host, or round robin, as in the built-in
        algorithms."""
        import ringlet._C as _C

        rank_at = _C.orders(list(hosts))[ORDERS.index(self.order) - 1]
        plain = Algorithm(self.collective, self.name, self.function, self.parts, origin=self.origin)
        made = plain.schedule(world, rank_at.index(root))
        positions = [packed(rounds, rank_at[p]) for p, rounds in enumerate(made.ranks)]
        ranks = map(unpacked, _C.relabelled(self.collective, made.parts, positions, rank_at))
        return assembled(self, tuple(ranks), made.parts, root, hosts)


def algorithm(
    collective: str, name: str | None = None, *, parts: Parts = None, order: str = "none"
) -> Callable[[Callable[..., Rounds]], Algorithm]:
    """Makes a function an algorithm of `collective`, under `name` (default: the function's name).

    The function may have the parameters `rank`, `world`, `root` and `hosts` (hosts[r] is the number of rank r's host).
    For broadcast, reduce, gather and scatter it must have `root`. It yields rounds. A round is a send, recv, reduce or
    copy (ringlet.schedule), or several of them. The function must be pure: it runs on every rank, for every rank.

    parts: the number of chunks of a divided collective (all_reduce, broadcast, reduce), or a function of the world that
    gives this number; default: the world. In the other collectives the number follows from the world
    (ringlet/schedule/collectives.py).
    order: "along" or "across" the hosts, for a function without the parameter `hosts`.

    Raises InvalidUsage if the name is taken, or if the function cannot be an algorithm. See docs/authoring.md.
    """

    from ringlet.schedule.named import register

    if callable(collective):
        raise InvalidUsage('algorithm: the collective is missing: write @ringlet.algorithm("all_reduce")')

    def decorate(function: Callable[..., Rounds]) -> Algorithm:
        return register(written(collective, name or str(getattr(function, "__name__", "")), function, parts, order))

    return decorate


def written(collective: str, name: str, function: Callable[..., Rounds], parts: Parts, order: str) -> Algorithm:
    """The algorithm, not yet registered under its name."""
    what = f"algorithm({collective!r}, name={name!r})"
    if collective not in COLLECTIVES:
        raise InvalidUsage(f"{what}: the collective must be one of {', '.join(COLLECTIVES)}")
    if not NAME.fullmatch(name) or name in RESERVED:
        raise InvalidUsage(
            f"{what}: the name must be a letter and up to 62 letters, digits and _ . + -, and none of "
            f"{', '.join(RESERVED)}"
        )
    if order not in ORDERS:
        raise InvalidUsage(f"{what}: order must be one of {', '.join(ORDERS)}, got {order!r}")
    if collective in BLOCKED and parts is not None:
        raise InvalidUsage(f"{what}: the parts of a {collective} follow from the world: leave parts= out")
    if not callable(function):
        raise InvalidUsage(f"{what}: must decorate a function, got {function!r:.60}")
    asked = _asked_for(function, what)
    if collective in ROOTED and "root" not in asked:
        raise InvalidUsage(f"{what}: a {collective} has a root: give the function a parameter root")
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    return Algorithm(collective, name, function, parts, order, summary, _origin(function))


def assembled(
    made: Algorithm, ranks: tuple[tuple[Round, ...], ...], parts: int, root: int, hosts: tuple[int, ...]
) -> Schedule:
    """The schedule of all ranks' rounds."""
    world = len(ranks)
    places = [(made.collective, rank, world, root, parts) for rank in range(world)]
    inputs = tuple(input_chunks(*place) for place in places)
    outputs = tuple(output_chunks(*place) for place in places)
    on_hosts = hosts if len(set(hosts)) > 1 else ()
    return Schedule(made.name, made.collective, world, root, parts, ranks, inputs, outputs, on_hosts)


def _check_place(collective: str, world: int, root: int, hosts: Sequence[int] | None) -> None:
    if world < 1 or not 0 <= root < world or (root and collective not in ROOTED):
        most = world - 1 if collective in ROOTED else 0
        raise InvalidUsage(f"{collective}: world must be at least 1, and root from 0 to {most}, got {world} and {root}")
    if hosts is not None and len(hosts) != world:
        raise InvalidUsage(f"{collective}: hosts must name the host of each of {world} ranks, got {len(hosts)} hosts")


def _asked_for(function: Callable[..., Any], what: str = "") -> tuple[str, ...]:
    """The names of the function's parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidUsage(f"{what}: {function!r:.60} has no readable signature: write it in Python") from error
    asked = tuple(p.name for p in parameters if p.name in PLACE and p.kind is not p.POSITIONAL_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [name for name in needed if name not in asked]
    if unknown:
        raise InvalidUsage(f"{what}: the function has a parameter {unknown[0]!r}; it may have {', '.join(PLACE)}")
    return asked


def _round(rank: int, index: int, yielded: Any) -> Round:
    try:
        steps = (yielded,) if isinstance(yielded, Step) else tuple(yielded)
        return Round(tuple(_whole(step) for step in steps))
    except (TypeError, AttributeError):
        text = f"yields {yielded!r:.80}, but a round is a send, recv, reduce or copy, or several of them"
        raise ScheduleError(rank, index, None, text) from None


def _raised(error: Exception) -> str:
    """What a user's function raised, and in which line."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"raises {type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"


def _whole(step: Step) -> Step:
    """The step with plain integers, whatever integer types it has."""
    return Step(step.verb, operator.index(step.peer), operator.index(step.first), operator.index(step.count))


def _origin(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else repr(function)[:60]


def load(path: str | Path) -> list[Algorithm]:
    """Registers the algorithms that a file has, and returns them: a Python file (.py) that makes some, or one that has
    schedules, in JSON (.json, ringlet/schedule/schedule_file.py) or MSCCL-XML (.xml). An algorithm of schedules has the
    file's name, and covers only the worlds in the file.

    A process runs a Python file once, however often it loads it, and again if the file has changed. Raises
    InvalidUsage, which names the file, if it cannot be read, fails, or makes no algorithm.
    """
    from ringlet.schedule.named import load as load_named

    return load_named(Path(path))
