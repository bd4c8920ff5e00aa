"""The algorithms: those built in, and a user's own, each a pure function of a rank's place that yields rounds.

    import ringlet
    from ringlet.schedule import recv, reduce, send

    @ringlet.algorithm("all_reduce", name="mine")
    def mine(rank, world):
        following, before = (rank + 1) % world, (rank - 1) % world
        for i in range(world - 1):
            yield send(following, (rank - 1 - i) % world), reduce(before, (rank - 2 - i) % world)
        for i in range(world - 1):
            yield send(following, (rank - i) % world), recv(before, (rank - 1 - i) % world)

After that, algorithm="mine" (or the object) is an algorithm like any other, and every engine runs its rounds. A group
proves it for its own world before the first call (ringlet/agreement.py). loading.py takes files. Source of the verbs:
csrc/schedule/step.h. No torch here.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import ringlet._C as _C
from ringlet.errors import InvalidUsage
from ringlet.schedule.collectives import BLOCKED, COLLECTIVES, ROOTED, required_parts
from ringlet.schedule.data import MOST_ROUNDS, MOST_STEPS, Round, Schedule, ScheduleError, Step, title
from ringlet.schedule.hosts import numbered
from ringlet.schedule.packed import packed, unpacked

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]{0,62}")
RESERVED = ("auto", "none", "nccl")
ORDERS = ("none", "along", "across")
PLACE = ("rank", "world", "root", "hosts")  # the parameters that a function may have

Rounds = Iterable[Step | Iterable[Step]]
Parts = int | Callable[[int], int] | None

_names = threading.RLock()  # a file that is loaded registers


def _unlock_in_child() -> None:
    """Another thread of the parent may have held the lock at the fork."""
    global _names
    _names = threading.RLock()


os.register_at_fork(after_in_child=_unlock_in_child)

_registered: dict[tuple[str, str], Algorithm] = {}  # the newest of each (collective, name)
_by_slot: dict[int, Algorithm] = {}
_contents: dict[int, Any] = {}  # of each slot, as they were when it was registered
_noting: list[list[Algorithm]] = []  # of `registering`


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
        try:
            _check_place(self.collective, world, root, hosts)
        except TypeError:
            given = f"world={world!r:.60}, root={root!r:.60} and hosts={hosts!r:.60}"
            raise InvalidUsage(
                f"{self.name}: world and root must be whole numbers, and hosts a list: {given}"
            ) from None
        on_hosts = numbered(hosts) if hosts is not None else (0,) * world
        try:
            if self.order != "none" and len(set(on_hosts)) > 1:
                return self._ordered(world, root, on_hosts)
            ranks = tuple(self._rounds(rank, world, root, on_hosts) for rank in range(world))
            return self._assembled(ranks, self.parts_of(world), root, on_hosts)
        except ScheduleError as error:
            error.schedule = title(self.name, self.collective, world, root, on_hosts)
            raise

    def parts_of(self, world: int) -> int:
        """The number of chunks of the schedule's buffer."""
        needed = required_parts(self.collective, world)
        if needed is not None:
            return needed
        try:
            parts = self.parts(world) if callable(self.parts) else self.parts
        except (Exception, SystemExit) as error:
            raise ScheduleError(0, None, None, f"parts {_raised(error)}") from error
        try:
            return operator.index(world if parts is None else parts)
        except TypeError:
            raise ScheduleError(0, None, None, f"parts must be a whole number, got {parts!r:.60}") from None

    def _rounds(self, rank: int, world: int, root: int, hosts: tuple[int, ...]) -> tuple[Round, ...]:
        place = dict(zip(PLACE, (rank, world, root, hosts), strict=True))
        wanted = {name: place[name] for name in _asked_for(self.function)}
        rounds: list[Round] = []
        try:
            for yielded in self._yielded(rank, self.function(**wanted)):
                if len(rounds) == MOST_ROUNDS:
                    raise ScheduleError(rank, len(rounds), None, f"yields more than {MOST_ROUNDS} rounds: does it end?")
                rounds.append(_round(rank, len(rounds), yielded))
        except (NotImplementedError, ScheduleError):
            raise
        except (Exception, SystemExit) as error:
            raise ScheduleError(rank, len(rounds), None, _raised(error)) from error
        return tuple(rounds)

    @staticmethod
    def _yielded(rank: int, returned: Any) -> Iterable[Any]:
        """What the function yields; None: nothing, as of a function without a yield that returns at once."""
        if inspect.iscoroutine(returned):
            returned.close()  # without a warning that nobody has awaited it
        if not isinstance(returned, Iterable | None):
            raise ScheduleError(rank, 0, None, f"returns {returned!r:.80}, but must yield rounds")
        return () if returned is None else returned

    def _ordered(self, world: int, root: int, hosts: tuple[int, ...]) -> Schedule:
        """Makes the schedule for positions. Ranks take these host after host, or round robin, as in the built-in
        algorithms."""
        rank_at = _C.orders(list(hosts))[ORDERS.index(self.order) - 1]
        plain = Algorithm(self.collective, self.name, self.function, self.parts, origin=self.origin)
        made = plain.schedule(world, rank_at.index(root))
        positions = [packed(rounds, rank_at[p]) for p, rounds in enumerate(made.ranks)]
        ranks = map(unpacked, _C.relabelled(self.collective, made.parts, positions, rank_at))
        return self._assembled(tuple(ranks), made.parts, root, hosts)

    def _assembled(
        self, ranks: tuple[tuple[Round, ...], ...], parts: int, root: int, hosts: tuple[int, ...]
    ) -> Schedule:
        on_hosts = hosts if len(set(hosts)) > 1 else ()
        return Schedule.of_rounds(self.collective, parts, ranks, root, self.name, on_hosts)


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
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
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
    if order != "none" and "hosts" in asked:
        raise InvalidUsage(
            f"{what}: order= is for a function without the parameter hosts: with it, the function orders them"
        )
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    return Algorithm(collective, name, function, parts, order, summary, _origin(function))


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
        steps = (yielded,) if isinstance(yielded, Step) else tuple(itertools.islice(yielded, MOST_STEPS + 1))
        if len(steps) > MOST_STEPS:
            raise ScheduleError(rank, index, None, f"yields a round of more than {MOST_STEPS} steps: does it end?")
        return Round(tuple(_whole(step) for step in steps))
    except (TypeError, AttributeError):
        text = f"yields {yielded!r:.80}, but a round is a send, recv, reduce or copy, or several of them"
        raise ScheduleError(rank, index, None, text) from None


def _raised(error: BaseException) -> str:
    """What a user's function raised, and in which line."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"raises {one_line(error)} ({Path(at.filename).name}:{at.lineno})"


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _whole(step: Step) -> Step:
    """The step with plain integers, whatever integer types it has."""
    return Step(step.verb, operator.index(step.peer), operator.index(step.first), operator.index(step.count))


def _origin(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else repr(function)[:60]


def schedule(
    algorithm: str | Algorithm,
    collective: str = "all_reduce",
    *,
    world: int | None = None,
    root: int = 0,
    hosts: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of all `world` ranks, as the engines run it.

    algorithm: a name of `algorithms()`, or an `Algorithm` of your own, whose collective then counts.
    root: for broadcast, reduce, gather and scatter.
    hosts: `hosts[r]` is any number for rank r's host, the same for ranks that share a host (default: all do). If given,
    its length is the world.
    Raises ValueError, which names what is known, for an unknown algorithm or collective, or a wrong world, root or
    hosts.
    """
    if not isinstance(algorithm, (str, Algorithm)):
        raise InvalidUsage(f"schedule: algorithm is {algorithm!r:.60}; pass a name, or an Algorithm of your own")
    if not isinstance(collective, str):
        raise InvalidUsage(f"schedule: collective is {collective!r:.60}; pass its name")
    try:
        hosts = None if hosts is None else [operator.index(host) for host in hosts]
        if world is None and not hosts:
            raise InvalidUsage("schedule: pass world= (the number of ranks) or hosts= (the host of each rank)")
        world, root = operator.index(len(hosts or ()) if world is None else world), operator.index(root)
    except TypeError as error:
        raise InvalidUsage(f"schedule: world, root and the hosts must be whole numbers: {error}") from error
    if max(abs(number) for number in (world, root, *(hosts or ()))) >= 1 << 31:
        raise InvalidUsage("schedule: world, root or a host is a number too large")
    own = [algorithm] if isinstance(algorithm, Algorithm) else registered(algorithm, collective)
    if own:
        return own[0].schedule(world, root, hosts)
    data: dict[str, Any] = _C.schedule(str(algorithm), collective, world, root, hosts)
    ranks = tuple(tuple(Round(tuple(Step(*s) for s in steps)) for steps in rounds) for rounds in data["ranks"])
    inputs, outputs = tuple(data["inputs"]), tuple(data["outputs"])
    on_hosts = numbered(hosts) if hosts and len(set(hosts)) > 1 else ()
    return Schedule(str(algorithm), collective, len(ranks), root, data["parts"], ranks, inputs, outputs, on_hosts)


def algorithms() -> list[tuple[str, str, str]]:
    """(algorithm, collective, one-line summary) of everything built in, in the registry's order."""
    return list(_C.algorithms())


def register(made: Algorithm) -> Algorithm:
    """Gives an algorithm its name in this process. The same function again is the same algorithm, unless what it refers
    to has changed. If another function has the name, later calls use the new one. Raises InvalidUsage for the name of a
    built-in algorithm."""
    key = (made.collective, made.name)
    content = (made.order, _content(made.function), _content(made.parts))
    with _names:
        placed = _registered.get(key)
        if placed is None or not _alike(_contents[placed.slot], content):
            slot = _C.add_algorithm(made.collective, made.name, made.summary)
            placed = _registered[key] = _by_slot[slot] = replace(made, slot=slot)
            _contents[slot] = content
        _note(placed)
        return placed


def register_again(one: Algorithm) -> Algorithm:
    """Gives a registered algorithm its name back if another has taken it since."""
    with _names:
        if _registered[one.collective, one.name] is not one:
            return register(one)
        _note(one)
        return one


@contextlib.contextmanager
def registering() -> Iterator[list[Algorithm]]:
    """Notes what is registered inside, in its order. No other thread registers meanwhile."""
    noted: list[Algorithm] = []
    with _names:
        _noting.append(noted)
        try:
            yield noted
        finally:
            _noting.pop()


def _note(one: Algorithm) -> None:
    for noted in _noting:
        noted.append(one)


def registered(name: str | None = None, collective: str | None = None) -> list[Algorithm]:
    """This process's own algorithms, the newest of each name; or only those of a name or a collective."""
    with _names:
        found = list(_registered.values())
    return [a for a in found if a.name == (name or a.name) and a.collective == (collective or a.collective)]


def name_of(algorithm: str | Algorithm) -> str:
    return algorithm if isinstance(algorithm, str) else algorithm.name


def at_slot(slot: int) -> Algorithm:
    """The algorithm that the core knows by that number."""
    return _by_slot[slot]


def _alike(a: Any, b: Any) -> bool:
    """Whether both contents are one: of a function that was made twice, by two threads or by a notebook cell that ran
    twice."""
    try:
        return bool(a == b)
    except Exception:  # they hold values that cannot be compared, such as two arrays
        return False


def _content(value: Any, module: dict[str, Any] | None = None, seen: set[int] | None = None) -> Any:
    """What a function of `module` does: its code, and the values that it refers to now, functions of the module among
    them. Any other value is its own content.

    module: the functions' globals; None: the function's own. seen: the functions that the content has already, by id:
    each is there once, however many refer to it.
    """
    code = getattr(value, "__code__", None)
    names = getattr(value, "__globals__", None)
    if code is None or names is None or (module is not None and module is not names):
        return value
    seen = set() if seen is None else seen
    if id(value) in seen:
        return code
    seen.add(id(value))
    try:
        held = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # a cell that is empty so far
        return value
    held += [getattr(value, "__self__", None), value.__defaults__, value.__kwdefaults__]  # __self__: of a method
    held += [names[name] for name in _names_in(code) if name in names]
    return code, tuple(_content(one, names, seen) for one in held)


def _names_in(code: CodeType) -> list[str]:
    """The globals, and the attributes, that the code and the functions within it name."""
    within = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [*code.co_names, *itertools.chain.from_iterable(map(_names_in, within))]
