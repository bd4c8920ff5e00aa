"""`ringlet search`: the best schedule for hosts and a machine, by predicted time and, with --measure, measured time."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringlet import _C
from ringlet.bench import results
from ringlet.bench.cases import Sweep, format_bytes
from ringlet.bench.clusters import Cluster
from ringlet.bench.rules import MARGIN, Timing, derive, table_text
from ringlet.cli import algorithm_files, bench, outputs, values
from ringlet.cli.parser import add_option
from ringlet.cli.terminal import did_you_mean, print_table, require_rich
from ringlet.errors import InvalidUsage
from ringlet.schedule import Schedule, ScheduleError
from ringlet.schedule.collectives import COLLECTIVES, ROOTED
from ringlet.schedule.cost import uplink_load
from ringlet.schedule.hosts import SYNTAX, Hosts
from ringlet.schedule.machine_file import HostsMachine, named, names, read_machine
from ringlet.schedule.prove import prove
from ringlet.schedule.search import Candidate, best, composed, schedules_of, search

MOST_RANKS = 128  # each candidate is executed once, in Python
MOVING = tuple(collective for collective in COLLECTIVES if collective != "barrier")

_EPILOG = """\
examples:
  ringlet search --collective all_reduce --hosts 4x2 --machine slow-uplinks
  ringlet search --hosts 4x2 --machine my.machine -b 64K -e 4M --measure -o racks

docs/selection.md describes the file of --machine.
"""


def add_parsers(subparsers: Any) -> None:
    """Adds `search`."""
    parser = subparsers.add_parser(
        "search",
        help="find the best schedule for hosts and a machine",
        description="Predict the time of every algorithm on a machine, of every composition of two (inside hosts and "
        "across hosts), and of their segmentations. Prove the fastest, and optionally measure them and write rules for "
        "`auto`.",
        epilog=_EPILOG,
    )
    parser.set_defaults(run=search_command)
    parser.add_argument("files", nargs="*", type=algorithm_files.of_file, metavar="FILE",
        help=f"search also among the algorithms of these files: {algorithm_files.FILES}")  # fmt: skip
    add = functools.partial(add_option, parser)
    add("--collective", type=values.one_of(MOVING), default="all_reduce", metavar="C",
        help=f"one of {', '.join(MOVING)} (default all_reduce)")  # fmt: skip
    add("--hosts", type=values.hosts, required=True, metavar="HOSTS", help=SYNTAX)
    add_machine_and_sizes(parser)
    add(
        "-k",
        dest="kept",
        type=values.whole(1),
        default=5,
        metavar="K",
        help="number of schedules to show at each size (default 5)",
    )
    add("--measure", action="store_true", help="measure these schedules on emulated hosts (needs root)")
    add("--rounds", type=values.whole(1), default=5, metavar="R", help="repetitions of --measure (default 5)")
    add("--margin", type=values.number(-100, 1e12), default=100 * MARGIN, metavar="PERCENT",
        help="least gain of a rule over the built-in choice (default 5)")  # fmt: skip
    add("-o", dest="output", type=values.file(), metavar="FILE",
        help="write rules to FILE, for RINGLET_TABLE, and the unregistered schedules to FILE.schedules/")  # fmt: skip


def add_machine_and_sizes(parser: Any) -> None:
    """The options that `machine_of` and `sizes_of` read."""
    add = functools.partial(add_option, parser)
    add("--machine", required=True, metavar="FILE", help=f"cost of messages: {', '.join(names())} or a file")
    add("-b", dest="begin_bytes", type=values.size, default=1 << 10, metavar="BYTES", help="smallest size (default 1K)")
    add("-e", dest="end_bytes", type=values.size, default=16 << 20, metavar="BYTES", help="largest size (default 16M)")
    add("-f", dest="factor", type=values.whole(2), default=16, metavar="F",
        help="factor from one size to the next (default 16)")  # fmt: skip


def search_command(args: argparse.Namespace) -> int:
    """Returns 0. Raises InvalidUsage if it cannot run."""
    require_rich()
    sizes = sizes_of(args)
    if len(args.hosts) > MOST_RANKS or len(args.hosts) < 2:
        raise InvalidUsage(f"--hosts: the search needs 2 to {MOST_RANKS} ranks, got {len(args.hosts)}")
    machine = machine_of(args)
    outputs.check({"-o": args.output})
    try:
        own = [one for made in args.files for one in made]
        schedules = schedules_of(args.collective, args.hosts, own)
        candidates = search(schedules, machine, sizes, _C.message_segments)
        kept = {size: best(candidates, size, args.kept) for size in sizes}
        for one in {id(c): c for chosen in kept.values() for c in chosen}.values():
            prove(one.schedule)
        _show(args, candidates, kept)
        timings = _timings(args, machine, candidates, kept)
    except ScheduleError as error:  # an algorithm of a file may be wrong
        raise InvalidUsage(str(error)) from error
    if args.output:
        rules = derive(timings, _C.chosen, args.margin / 100)
        needs = algorithm_files.comment(rule.algorithm for rule in rules)
        outputs.write_table(args.output, _heading(args, machine) + needs + table_text(rules))
        print(
            f"wrote {args.output}: {len(rules)} rule{'s' * (len(rules) != 1)} before the built-in ones", file=sys.stderr
        )
    return 0


def _timings(
    args: argparse.Namespace, machine: HostsMachine, candidates: list[Candidate], kept: dict[int, list[Candidate]]
) -> list[Timing]:
    """Measured or predicted times of what a rule can name: registered candidates, and the k fastest, which become
    algorithms by files."""
    files = {c.name: c.schedule for chosen in kept.values() for c in chosen if not c.registered}
    if not (args.measure or args.output):
        return []
    with tempfile.TemporaryDirectory() as elsewhere:
        folder = args.output.with_name(f"{args.output.name}.schedules") if args.output else Path(elsewhere)
        folder.mkdir(exist_ok=True)
        for name, schedule in files.items():
            path = folder / f"{name}.json"
            path.write_text(_for_every_root(schedule), encoding="utf-8")
            algorithm_files.of_file(str(path))
        if args.measure:
            return _measured(args, machine, kept)
    return _predicted(args, [c for c in candidates if c.registered or c.name in files])


def _for_every_root(schedule: Schedule) -> str:
    """The text of a file that has the schedule, and those of the other roots: a rule holds for calls of every root."""
    if schedule.collective not in ROOTED:
        return schedule.json()
    hosts = schedule.hosts or (0,) * schedule.world
    found = [composed(schedule.algorithm, schedule.collective, hosts, root) for root in range(schedule.world)]
    return "[" + ",\n".join(one.json() for one in found) + "]\n"


def sizes_of(args: argparse.Namespace) -> list[int]:
    """The sizes from -b to -e. InvalidUsage if there are none."""
    if args.end_bytes < args.begin_bytes:
        raise InvalidUsage("sizes: -e must be at least -b")
    sizes = [args.begin_bytes]
    while sizes[-1] * args.factor <= args.end_bytes:
        sizes.append(sizes[-1] * args.factor)
    return sizes


def machine_of(args: argparse.Namespace) -> HostsMachine:
    """The machine of --machine. InvalidUsage if there is none, or if it is wrong."""
    known = names()
    if args.machine not in known and not Path(args.machine).suffix and not Path(args.machine).exists():
        near = did_you_mean(args.machine, known)
        raise InvalidUsage(f"--machine: {values.shown(args.machine)} is none of {', '.join(known)}, nor a file{near}")
    return read_machine(named(args.machine))


def _medium(hosts: Hosts) -> str:
    """The condition of rules for these hosts."""
    several = len(set(hosts))
    return "staged" if several == 1 else "hosts" if several < len(hosts) else "apart"


def _built_in(args: argparse.Namespace, size: int) -> str:
    return str(_C.chosen(args.collective, size, len(args.hosts), _medium(args.hosts)))


def _show(args: argparse.Namespace, candidates: Sequence[Candidate], kept: dict[int, list[Candidate]]) -> None:
    """Prints for each size the fastest schedules, and the one that `auto` chooses now."""
    by_name = {candidate.name: candidate for candidate in candidates}
    print(f"{len(candidates)} schedules of {args.collective}; proved the {args.kept} fastest at each size")
    rows = []
    for size, chosen in kept.items():
        usual = by_name.get(_built_in(args, size))
        for candidate in [*chosen, *([usual] if usual and usual not in chosen else [])]:
            rows.append(
                (
                    format_bytes(size), candidate.name, f"{candidate.seconds[size] * 1e6:.1f}",
                    str(candidate.schedule.rounds), f"{float(uplink_load(candidate.schedule)):g}",
                    "auto" if candidate is usual else "",
                )
            )  # fmt: skip
    print_table(("size", "schedule", "predicted us", "rounds", "uplink, S", ""), rows, words=(0, 1, 5))


def _predicted(args: argparse.Namespace, candidates: Iterable[Candidate]) -> list[Timing]:
    """Predicted times of candidates."""
    world, medium = len(args.hosts), _medium(args.hosts)
    return [
        Timing(args.collective, medium, world, size, candidate.name, {0: seconds})
        for candidate in candidates
        for size, seconds in candidate.seconds.items()
    ]


def _measured(args: argparse.Namespace, machine: HostsMachine, kept: dict[int, list[Candidate]]) -> list[Timing]:
    """Times of `auto`'s choice and of the fastest, on hosts with the machine's uplinks. BenchError if one is wrong."""
    names = {candidate.name for chosen in kept.values() for candidate in chosen}
    names |= {_built_in(args, size) for size in kept}
    sizes = sorted(kept)
    cluster = _cluster(args.hosts, machine)
    sweep = Sweep(
        worlds=(len(args.hosts),), collectives=(args.collective,), algorithms=tuple(sorted(names)), hosts=cluster,
        begin_bytes=sizes[0], end_bytes=sizes[-1], factor=args.factor, rounds=args.rounds, memory=("ordinary",),
        sample_ms=20,
    )  # fmt: skip
    bench.require_able(sweep)
    rows, _ = bench.measure(sweep)
    results.require_right(rows)
    timings: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        timings.setdefault((row["bytes"], row["algorithm"]), {})[row["round"]] = row["time_us_p50"]
    for (size, name), times in sorted(timings.items(), key=lambda item: (item[0][0], sorted(item[1].values()))):
        print(f"measured  {format_bytes(size):>6}  {name:<20}  {sorted(times.values())[len(times) // 2]:.1f} us")
    world, medium = len(args.hosts), _medium(args.hosts)
    return [Timing(args.collective, medium, world, size, name, times) for (size, name), times in timings.items()]


def _cluster(hosts: Hosts, machine: HostsMachine) -> Cluster | None:
    """Emulated hosts; None for one host, which this machine is. InvalidUsage for hosts that cannot be emulated."""
    count = len(set(hosts))
    if count == 1:
        return None
    size = len(hosts) // count
    for numbering in ("block", "cyclic"):
        cluster = Cluster(count, size, numbering, uplink_mbit=machine.uplink_mbit)
        if tuple(cluster.host_of(rank) for rank in range(len(hosts))) == tuple(hosts):
            return cluster
    raise InvalidUsage("--measure: emulated hosts must have equally many ranks: give --hosts as 4x2 or 4x2:cyclic")


def _heading(args: argparse.Namespace, machine: HostsMachine) -> str:
    how = "measured on emulated hosts" if args.measure else "predicted"
    return (
        f"# ringlet search --collective {args.collective}, {len(set(args.hosts))} hosts, {machine.name}: {how}\n"
        f"# Rules that gain at least {args.margin:g} % over the built-in choice.\n"
    )
