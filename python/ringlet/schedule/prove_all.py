"""Proves what is registered, for many worlds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence

from ringlet.schedule import registry
from ringlet.schedule.collectives import ROOTED
from ringlet.schedule.prove import Proof, prove
from ringlet.schedule.registry import Algorithm, name_of

ALL_ROOTS_UP_TO = 16


def prove_all(
    worlds: Iterable[int],
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
    algorithms: Collection[str | Algorithm] = (),
    collectives: Collection[str] = (),
    hosts: Sequence[int] | None = None,
) -> list[Proof]:
    """Proves every built-in schedule, or those of some algorithms (names, or own ones) or collectives, for every world.

    Rooted collectives are proved for every root up to a world of ALL_ROOTS_UP_TO, and for the first two, the middle and
    the last root above. `hosts[r]` is rank r's host (default: all share one); worlds must be its length then.
    `progress(done, total, name)` is called before each proof and once at the end.
    Raises the first ScheduleError; ValueError if nothing registered has that name, or if an algorithm covers none of
    the worlds.
    """
    rows, worlds = _rows(algorithms, collectives), list(worlds)
    cases = [(a, c, world, root) for a, c in rows for world in worlds for root in _roots(c, world)]
    proofs, covered = [], set()
    for done, (a, c, world, root) in enumerate(cases):
        progress(done, len(cases), f"{name_of(a)} {c}")
        # One of a user's own may not cover every world.
        with contextlib.suppress(NotImplementedError):
            proofs.append(prove(registry.schedule(a, c, world=world, root=root, hosts=hosts)))
            covered.add((a, c))
    idle = [name_of(a) for a, c in rows if (a, c) not in covered]
    if idle:
        raise ValueError(f"{', '.join(idle)} covers none of these worlds")
    progress(len(cases), len(cases), "")
    return proofs


def _rows(chosen: Collection[str | Algorithm], collectives: Collection[str]) -> list[tuple[str | Algorithm, str]]:
    """(algorithm, collective) of what is chosen; of all that is built in, if `chosen` is empty."""
    known: list[tuple[str | Algorithm, str]] = [(a, c) for a, c, _ in registry.algorithms()]
    known += [(own.name, own.collective) for own in registry.registered() if own.name in chosen]
    known += [(own, own.collective) for own in chosen if isinstance(own, Algorithm)]
    rows = [(a, c) for a, c in known if a in (chosen or [a]) and c in (collectives or [c])]
    if not rows:
        wanted = " ".join(map(",".join, filter(None, ([name_of(a) for a in chosen], collectives))))
        near = [f"{name_of(a)} {c}" for a, c in known if a in chosen or c in collectives]
        all_names = dict.fromkeys(name_of(a) for a, _ in known)
        raise ValueError(f"no registered schedule is called {wanted}; known: {', '.join(near or all_names)}")
    return rows


def _roots(collective: str, world: int) -> Iterable[int]:
    if collective not in ROOTED:
        return [0]
    return range(world) if world <= ALL_ROOTS_UP_TO else [0, 1, world // 2, world - 1]
