"""`ringlet explore`: the page in which schedules move, as one file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringlet.cli import algorithm_files, options, outputs
from ringlet.cli.terminal import did_you_mean, progress
from ringlet.errors import InvalidUsage
from ringlet.log import ranges
from ringlet.schedule import draw_trees
from ringlet.schedule.collectives import COLLECTIVES
from ringlet.schedule.explore import page
from ringlet.schedule.explore.embed import MOST_WORLD, Source, catalogue, known_sources
from ringlet.schedule.loading import load_given
from ringlet.schedule.registry import name_of
from ringlet.schedule.search import alone


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "explore", explore_command,
        help="make a page in which schedules move",
        description="Make one HTML page in which you can play, step and compare schedules. The page needs no network. "
        "It has all algorithms, and shows the named ones first.",
        examples="ringlet explore -o page.html\nringlet explore ring butterfly -o page.html\n"
        "ringlet explore ring mine.py -o page.html",
    )  # fmt: skip
    parser.add_argument("algorithms", nargs="*", type=algorithm_files.names(), metavar="ALGORITHM",
        help=f"show this algorithm first, and a second one beside it; or files: {algorithm_files.FILES}")  # fmt: skip
    options.add(parser, "collective", help="show this collective first: one of KNOWN")
    options.add(parser, "worlds", default="2-16",
        help=f"numbers of ranks in the page, from 2 to {MOST_WORLD} (default %(default)s)")  # fmt: skip
    parser.add_argument("--revealed", type=options.file(), metavar="FILE",
        help="show the trees that `ringlet reveal --json FILE` has written beside those of the algorithms")  # fmt: skip
    options.add(parser, "output", type=options.file(".html"), required=True, help="write the page to FILE.html")


def explore_command(args: argparse.Namespace) -> int:
    """Makes the page. Raises InvalidUsage if there is no such schedule."""
    outputs.check({"-o": args.output})
    if not 2 <= min(args.worlds) <= max(args.worlds) <= MOST_WORLD:
        raise InvalidUsage(
            f"--world: the page shows 2 to {MOST_WORLD} ranks, got {min(args.worlds)} to {max(args.worlds)}"
        )
    names = [name for found in args.algorithms for name in found]
    given = load_given()
    sources = known_sources(given)
    trees, ranks = _revealed(args.revealed) if args.revealed else ("", 0)
    start = _start(names, args.collective, sources)
    if ranks in args.worlds:
        start["ranks"] = ranks
    for own in (own for own in given if own.name in names and own.collective == start["collective"]):
        covered = [world for world in args.worlds if alone(own, own.collective, (0,) * world)]
        if not covered:
            raise InvalidUsage(f"{own.name} has no schedule for {ranges(args.worlds)} ranks")
        if len(covered) < len(args.worlds):
            start.setdefault("ranks", covered[0])
    with progress("executing schedules") as watch:
        html = page(catalogue(sources, args.worlds, start, watch), trees)
    outputs.write(args.output, html)
    print(f"{args.output}: {len(html.encode()) / 1024:.0f} KiB, all algorithms, worlds {ranges(args.worlds)}")
    return 0


def _revealed(path: Path) -> tuple[str, int]:
    """The trees in a file of `ringlet reveal --json`, drawn, and the number of ranks of the first."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return draw_trees.svg(found), int(found[0]["world"])
    except OSError as error:
        raise InvalidUsage(f"--revealed: cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidUsage(f"--revealed: {path} is no file that ringlet reveal --json writes") from error


def _start(names: Sequence[str], collective: str | None, sources: list[Source]) -> dict[str, Any]:
    """The first view of the page: a collective of the first algorithm, and at most two of its algorithms."""
    if len(names) > 2:
        raise InvalidUsage(f"the page shows one algorithm, or two side by side, got {len(names)}")
    having: dict[str, list[str]] = {}
    for source in sources:
        having.setdefault(name_of(source[0]), []).append(source[1])
    for name in names:
        if name not in having:
            near = did_you_mean(name, having)
            raise InvalidUsage(f"no algorithm is called {options.shown(name)}{near}; known: {', '.join(having)}")
    if not names:
        collective = collective or COLLECTIVES[0]
        names = [name for name, found in having.items() if collective in found][:2]
    common = [one for one in COLLECTIVES if all(one in having[name] for name in names)]
    if collective is None and not common:
        raise InvalidUsage(f"{' and '.join(names)} have no collective in common: give only one of them")
    if collective is not None and collective not in common:
        raise InvalidUsage(f"{' or '.join(names)} has no {collective}; it has: {', '.join(common) or 'nothing'}")
    return {"collective": collective or common[0], **dict(zip("ab", names, strict=False))}
