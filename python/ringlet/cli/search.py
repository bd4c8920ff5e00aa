"""`ringlet search`: the best schedule for hosts and a machine, by predicted time."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringlet import _C
from ringlet.bench.cases import format_bytes
from ringlet.bench.rules import Timing, derive, table_text
from ringlet.cli import algorithm_files, options, outputs
from ringlet.cli.terminal import did_you_mean, print_table, require_rich
from ringlet.errors import InvalidUsage
from ringlet.schedule import Schedule
from ringlet.schedule.collectives import COLLECTIVES, ROOTED
from ringlet.schedule.cost import uplink_load
from ringlet.schedule.hosts import Hosts
from ringlet.schedule.machine_file import Machine, named, names, read_machine
from ringlet.schedule.prove import prove
from ringlet.schedule.search import Candidate, best, composed, has_use, schedules_of, search

MOST_RANKS = 128  # each candidate is executed once, in Python
MOVING = tuple(collective for collective in COLLECTIVES if collective != "barrier")


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "search", search_command,
        help="find the best schedule for hosts and a machine",
        description="Predict the time of every algorithm on a machine, of every composition of two (inside hosts and "
        "across hosts), and of their segmentations. Prove the fastest, and optionally write rules for `auto`.",
        examples="ringlet search --collective all_reduce --hosts 4x2 --machine slow-uplinks\n"
        "ringlet search --hosts 4x2 --machine my.machine -b 64K -e 4M -o racks\n\n"
        "docs/selection.md describes the file of --machine.",
    )  # fmt: skip
    parser.add_argument("files", nargs="*", type=algorithm_files.of_file, metavar="FILE",
        help=f"search also among the algorithms of these files: {algorithm_files.FILES}")  # fmt: skip
    options.add(parser, "collective", known=MOVING, default="all_reduce")
    options.add(parser, "hosts", required=True)
    add_machine_and_sizes(parser)
    parser.add_argument("-k", dest="kept", type=options.whole(1), default=5, metavar="K",
        help="number of schedules to show at each size (default 5)")  # fmt: skip
    options.add(parser, "margin")
    options.add(parser, "output", type=options.file(),
        help="write rules to FILE, for RINGLET_TABLE, and the unregistered schedules to FILE.schedules/")  # fmt: skip


def add_machine_and_sizes(parser: Any) -> None:
    """The options that `machine_of` and `sizes_of` read."""
    options.add(parser, "machine", help=f"cost of messages: {', '.join(names())} or a file")
    for name in ("begin", "end", "factor"):
        options.add(parser, name)


def search_command(args: argparse.Namespace) -> int:
    """Returns 0. Raises InvalidUsage if it cannot run, ScheduleError if an algorithm of a file is wrong."""
    require_rich()
    sizes = sizes_of(args)
    if len(args.hosts) > MOST_RANKS or len(args.hosts) < 2:
        raise InvalidUsage(f"--hosts: the search needs 2 to {MOST_RANKS} ranks, got {len(args.hosts)}")
    machine = machine_of(args)
    outputs.check({"-o": args.output})
    if args.output and _folder(args.output).exists() and not _folder(args.output).is_dir():
        raise InvalidUsage(f"-o: {_folder(args.output)}, for the schedules of the rules, is no folder: remove it")
    own = list(dict.fromkeys(one for made in args.files for one in made))
    algorithm_files.require_names_apart(own)
    for made in args.files:
        if not any(has_use(one, args.collective, args.hosts, own) for one in made):
            raise InvalidUsage(f"{made[0].origin}: has no {args.collective} for {len(args.hosts)} ranks (root 0)")
    candidates = search(schedules_of(args.collective, args.hosts, own), machine, sizes, _C.message_segments)
    kept = {size: best(candidates, size, args.kept) for size in sizes}
    for one in {id(c): c for chosen in kept.values() for c in chosen}.values():
        prove(one.schedule)
    _show(args, candidates, kept)
    if args.output:
        _write(args, machine, candidates, kept)
    return 0


def sizes_of(args: argparse.Namespace) -> list[int]:
    """The sizes from -b to -e. InvalidUsage if there are none."""
    if args.end_bytes < args.begin_bytes:
        raise InvalidUsage("sizes: -e must be at least -b")
    sizes = [args.begin_bytes]
    while sizes[-1] * args.factor <= args.end_bytes:
        sizes.append(sizes[-1] * args.factor)
    return sizes


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine of --machine, a name or a file. InvalidUsage if there is none, or if it is wrong."""
    known = names()
    if args.machine not in known and not Path(args.machine).suffix and not Path(args.machine).exists():
        near = did_you_mean(args.machine, known)
        raise InvalidUsage(f"--machine: {options.shown(args.machine)} is none of {', '.join(known)}, nor a file{near}")
    return read_machine(named(args.machine))


def _medium(hosts: Hosts) -> str:
    """The condition of rules for these hosts."""
    several = len(set(hosts))
    return "staged" if several == 1 else "hosts" if several < len(hosts) else "apart"


def _show(args: argparse.Namespace, candidates: Sequence[Candidate], kept: dict[int, list[Candidate]]) -> None:
    """Prints for each size the fastest schedules, and the one that `auto` chooses now."""
    by_name = {candidate.name: candidate for candidate in candidates}
    print(f"{len(candidates)} schedules of {args.collective}; proved the {args.kept} fastest at each size")
    rows = []
    for size, chosen in kept.items():
        usual = by_name.get(_C.chosen(args.collective, size, len(args.hosts), _medium(args.hosts)))
        for candidate in [*chosen, *([usual] if usual and usual not in chosen else [])]:
            rows.append(
                (
                    format_bytes(size), candidate.name, f"{candidate.seconds[size] * 1e6:.1f}",
                    str(candidate.schedule.rounds), f"{float(uplink_load(candidate.schedule)):g}",
                    "auto" if candidate is usual else "",
                )
            )  # fmt: skip
    print_table(("size", "schedule", "predicted us", "rounds", "uplink, S", ""), rows, words=(0, 1, 5))


def _write(
    args: argparse.Namespace, machine: Machine, candidates: Sequence[Candidate], kept: dict[int, list[Candidate]]
) -> None:
    """Writes rules by the predicted times of what a rule can name: registered candidates, and the k fastest, which
    become algorithms by files."""
    beside = not args.output.exists() or args.output.is_file()  # a pipe has no folder for schedules beside it
    written: list[str] = []
    for one in {c.name: c for chosen in kept.values() for c in chosen if beside and not c.registered}.values():
        if whole := _of_every_root(one.schedule):
            _folder(args.output).mkdir(exist_ok=True)
            path = _folder(args.output) / f"{one.name}.json"
            texts = [each.json() for each in whole]
            outputs.write(path, texts[0] if len(texts) == 1 else "[" + ",\n".join(texts) + "]\n")
            algorithm_files.of_file(str(path))
            written.append(one.name)
    own = {one.name for made in args.files for one in made}
    named = (c for c in candidates if c.registered and (c.name not in own or _of_every_root(c.schedule)))
    known = {*written, *(candidate.name for candidate in named)}
    timings = [
        Timing(
            args.collective, _medium(args.hosts), len(args.hosts), size, candidate.name, {0: candidate.seconds[size]}
        )
        for size in kept
        for candidate in best(candidates, size, len(candidates))  # of equally fast ones, the first has the rule
        if candidate.name in known
    ]
    rules = derive(timings, _C.chosen, args.margin / 100)
    text = (
        f"# ringlet search --collective {args.collective}, {len(set(args.hosts))} hosts, {machine.name}: predicted\n"
        f"# Rules that gain at least {args.margin:g} % over the built-in choice.\n"
        + algorithm_files.comment(rule.algorithm for rule in rules)
    )
    outputs.write_table(args.output, text + table_text(rules))
    print(f"wrote {args.output}: {len(rules)} rule{'s' * (len(rules) != 1)} before the built-in ones", file=sys.stderr)


def _folder(output: Path) -> Path:
    """For the schedules that a table's rules name."""
    return output.with_name(f"{output.name}.schedules")


def _of_every_root(one: Schedule) -> list[Schedule]:
    """The schedule, and those of the other roots: a rule holds for calls of every root. Empty if one lacks."""
    if one.collective not in ROOTED:
        return [one]
    hosts = one.hosts or (0,) * one.world
    with contextlib.suppress(NotImplementedError):
        return [composed(one.algorithm, one.collective, hosts, root) for root in range(one.world)]
    return []
