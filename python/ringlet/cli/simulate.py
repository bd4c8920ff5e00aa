"""`ringlet simulate`: the predicted time of chosen schedules on a machine, and what they spend it on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ringlet import _C
from ringlet.bench.cases import format_bytes
from ringlet.bench.plot import FORMATS, plot_times, require_matplotlib
from ringlet.cli import algorithm_files, options, outputs
from ringlet.cli.search import MOVING, add_machine_and_sizes, machine_of, sizes_of
from ringlet.cli.terminal import did_you_mean, print_table, require_rich
from ringlet.errors import InvalidUsage
from ringlet.schedule import Algorithm, Schedule, ScheduleError, algorithms
from ringlet.schedule.collectives import ROOTED
from ringlet.schedule.cost import Link, Predictor, Times
from ringlet.schedule.hosts import Hosts, described
from ringlet.schedule.machine_file import HostsMachine
from ringlet.schedule.search import composed

MOST_RANKS = 256  # each schedule is executed once, in Python

_EXAMPLES = """\
ringlet simulate --hosts 4x2 --machine slow-uplinks
ringlet simulate ring mine.py --hosts 4x2 --machine my.machine --sizes 4K,1M,64M --explain 1M
ringlet simulate tree chain.8 --collective broadcast --world 8 --machine p5-hosts --plot times.svg --json times.json

`ringlet search` looks for the fastest. docs/selection.md describes the model and the file of --machine."""
_LEGEND = """\
The five columns add up to the time. They are of the chain of rounds, each waiting for the one before, that ends last,
or of the link or the rank that is busy for longer.
latency: before a round's first byte. messages: a rank's work for each. combining: sums of what a rank has and receives.
link busy: the share of the time in which the busiest link carries bytes.
"""


@dataclass(frozen=True)
class Simulated:
    """A schedule with its seconds by size in bytes, what they are spent on at some of the sizes, and the busiest links
    with what each carries, in units of S."""

    schedule: Schedule
    seconds: dict[int, float]
    times: dict[int, Times]
    links: list[Link]
    carried: Fraction

    def busy(self, size: int, machine: HostsMachine) -> float:
        """The share of the time in which the busiest link carries bytes."""
        beta = machine.uplink_beta if self.links and self.links[0].of == "host" else machine.inside_beta
        return float(self.carried) * size * beta / self.seconds[size] if self.seconds[size] else 0.0


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "simulate", simulate_command,
        help="predict the time of schedules on a machine",
        description="Predict how long each schedule takes on hosts that a file describes, at each size, and show its "
        "rounds, its busiest link and what the time is spent on. Nothing is run.",
        examples=_EXAMPLES,
    )  # fmt: skip
    parser.add_argument("algorithms", nargs="*", type=_names_or_own, metavar="ALGORITHM",
        help="a name, one that `search` shows (two_shot+ring, chain.8), or a file: "
        f"{algorithm_files.FILES} (default: all algorithms of the collective)")  # fmt: skip
    options.add(
        parser, "collective", known=MOVING, help="one of KNOWN (default: that of the first file, or all_reduce)"
    )
    place = parser.add_mutually_exclusive_group(required=True)
    options.add(place, "world", help="number of ranks, all on one host")
    options.add(place, "hosts")
    options.add(parser, "root")
    add_machine_and_sizes(parser)
    parser.add_argument(
        "--sizes", type=options.sizes, metavar="S,S", help="these sizes, and not those of -b, -e and -f"
    )
    parser.add_argument("--segments", type=options.whole(1, 1 << 16), metavar="N",
        help="number of segments of each message (default: as the engine cuts the size)")  # fmt: skip
    parser.add_argument("--explain", type=options.size, metavar="BYTES",
        help="the size at which to show what the time is spent on (default: the middle one)")  # fmt: skip
    options.add(parser, "json")
    options.add(parser, "plot", type=options.file(*FORMATS), help=f"also draw time over size ({', '.join(FORMATS)})")


def simulate_command(args: argparse.Namespace) -> int:
    """Returns 0. Raises InvalidUsage if it cannot run, or if an algorithm of a file is wrong."""
    require_rich()
    shown = list(args.sizes or sizes_of(args))
    explained = args.explain or shown[len(shown) // 2]
    hosts = args.hosts or (0,) * args.world
    if not 2 <= len(hosts) <= MOST_RANKS:
        raise InvalidUsage(f"ringlet simulates 2 to {MOST_RANKS} ranks, got {len(hosts)}")
    machine = machine_of(args)
    outputs.check({"--json": args.json, "--plot": args.plot})
    if args.plot:
        require_matplotlib()
    schedules = list(_schedules(args, hosts))
    segments = {size: args.segments or _C.message_segments(size) for size in {*shown, explained}}
    found = [_simulated(one, machine, segments, segments if args.json else [explained]) for one in schedules]
    _show(found, machine, {size: segments[size] for size in shown})
    _explain(found, machine, explained)
    if args.json:
        args.json.write_text(json.dumps(_plain(found, machine, segments), indent=1) + "\n", encoding="utf-8")
    if args.plot:
        times = {one.schedule.algorithm: {size: one.seconds[size] * 1e6 for size in shown} for one in found}
        plot_times(times, args.plot, f"{_what(found[0].schedule)}, {machine.name}: predicted time")
    return 0


def _names_or_own(text: str) -> list[str | Algorithm]:
    """A type for argparse: names with commas between them, files, or both."""
    found: list[str | Algorithm] = []
    for word in text.split(","):
        found += algorithm_files.of_file(word) if algorithm_files.is_file(word) else [options.name(word)]
    return found


def _schedules(args: argparse.Namespace, hosts: Hosts) -> Iterator[Schedule]:
    """The chosen schedules, each once; those of files are proved. InvalidUsage if one is not there."""
    wanted = list(dict.fromkeys(one for words in args.algorithms for one in words))
    own = [one for one in wanted if isinstance(one, Algorithm)]
    collective = args.collective or (own[0].collective if own else "all_reduce")
    roots = len(hosts) if collective in ROOTED else 1
    if args.root >= roots:
        raise InvalidUsage(f"--root: {collective} takes a root from 0 to {roots - 1} here, got {args.root}")
    given = [one for one in algorithm_files.given() if one.collective == collective]
    built_in = [name for name, of, _ in algorithms() if of == collective]
    for one in wanted or [*built_in, *given]:
        name = one if isinstance(one, str) else one.name
        mine = one if isinstance(one, Algorithm) else next((made for made in given if made.name == name), None)
        if mine and mine.collective != collective:
            raise InvalidUsage(f"{mine.name} is an algorithm of {mine.collective}, not of {collective}: leave it out")
        try:
            made = mine.schedule(len(hosts), args.root, hosts) if mine else composed(name, collective, hosts, args.root)
        except NotImplementedError as error:  # it does not cover this world
            if wanted:
                raise InvalidUsage(f"{name}: {error}") from error
            continue
        except ScheduleError:
            raise
        except ValueError as error:
            raise InvalidUsage(f"{options.shown(name)}: {error}{did_you_mean(name, built_in)}") from error
        if mine:
            made.prove()
        yield made


def _simulated(made: Schedule, machine: HostsMachine, segments: dict[int, int], detailed: Iterable[int]) -> Simulated:
    predictor = Predictor(made)
    seconds = {size: predictor.seconds(size, machine, count) for size, count in segments.items()}
    times = {size: predictor.times(size, machine, segments[size]) for size in detailed}
    return Simulated(made, seconds, times, *predictor.busiest_links(machine))


def _show(found: Sequence[Simulated], machine: HostsMachine, segments: dict[int, int]) -> None:
    """Prints the times of all, and marks the fastest at each size."""
    print(f"{_what(found[0].schedule)}, on {machine.name!r}: predicted time in us, * the fastest at its size")
    best = {size: min(one.seconds[size] for one in found) for size in segments}
    columns = ("schedule", *map(format_bytes, segments), "rounds", "busiest link", "carries")
    rows = []
    for one in found:
        cells = [_micros(one.seconds[size]) + ("*" if one.seconds[size] == best[size] else " ") for size in segments]
        rows.append((one.schedule.algorithm, *cells, str(one.schedule.rounds), _links(one), f"{one.carried} S"))
    if set(segments.values()) != {1}:
        rows.append(("(segments)", *(f"{count} " for count in segments.values()), "", "", ""))
    print_table(columns, rows, words=(0, len(columns) - 2))
    print("busiest link: the one that needs longest for the bytes it carries in all, in sizes S of the message")
    if set(segments.values()) != {1}:
        print("(segments): the pieces of a message that follow each other through the rounds, so that these overlap")
    print()


def _explain(found: Sequence[Simulated], machine: HostsMachine, size: int) -> None:
    """Prints what all spend their time on at one size, the fastest first."""
    print(f"where the time goes at {format_bytes(size)}, in us")
    titles = ("latency", "messages", "bytes inside hosts", "bytes between hosts", "combining")
    rows: list[tuple[str, ...]] = []
    for one in sorted(found, key=lambda one: one.seconds[size]):
        cells = (_micros(seconds) for seconds in one.times[size])
        rows.append(
            (one.schedule.algorithm, _micros(one.seconds[size]), *cells, f"{100 * one.busy(size, machine):.0f} %")
        )
    print_table(("schedule", "time", *titles, "link busy"), rows)
    print(_LEGEND, end="")


def _what(made: Schedule) -> str:
    place = described(made.hosts) or "one host"
    return f"{made.collective} of {made.world} ranks, {place}"


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _links(one: Simulated) -> str:
    """ "into host 0, and 2 more" """
    if not one.links:
        return "none"
    first, others = one.links[0], len(one.links) - 1
    if len(one.links) == 2 * (len(set(one.schedule.hosts)) if first.of == "host" else one.schedule.world):
        return f"each {first.of}'s, both ways"
    return f"{first.way} {first.of} {first.number}" + (f", and {others} more" if others else "")


def _plain(found: Sequence[Simulated], machine: HostsMachine, segments: dict[int, int]) -> dict[str, Any]:
    first = found[0].schedule
    rows = [
        {
            "algorithm": one.schedule.algorithm,
            "bytes": size,
            "segments": count,
            "seconds": one.seconds[size],
            "spent": one.times[size]._asdict(),
            "rounds": one.schedule.rounds,
            "busiest_links": [link._asdict() for link in one.links],
            "busiest_carries": str(one.carried),
            "busiest_busy": one.busy(size, machine),
        }
        for one in found
        for size, count in sorted(segments.items())
    ]
    head = {"collective": first.collective, "world": first.world, "root": first.root, "hosts": list(first.hosts)}
    return {**head, "machine": machine.name, "rows": rows}
