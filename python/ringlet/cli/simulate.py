"""`ringlet simulate`: the predicted time of chosen schedules on a machine, and what they spend it on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ringlet import _C
from ringlet.bench.cases import format_bytes
from ringlet.bench.plot import FORMATS, plot_times, require_matplotlib
from ringlet.cli import algorithm_files, options, outputs
from ringlet.cli.search import MOVING, add_machine_and_sizes, machine_of, sizes_of
from ringlet.cli.terminal import did_you_mean, print_table, require_rich
from ringlet.errors import InvalidUsage
from ringlet.schedule import Algorithm, Schedule, ScheduleError, algorithms
from ringlet.schedule.cost import Predictor, Times, uplink_load
from ringlet.schedule.hosts import Hosts, described
from ringlet.schedule.loading import load_given
from ringlet.schedule.registry import name_of, registered
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
"""

Found = list[tuple[Schedule, dict[int, Times]]]  # by size in bytes


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "simulate", simulate_command,
        help="predict the time of schedules on a machine",
        description="Predict how long each schedule takes on hosts that a file describes, at each size, and show its "
        "rounds, the load of its uplinks and what the time is spent on. Nothing is run.",
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
    segments = {size: args.segments or _C.message_segments(size) for size in sorted({*shown, explained})}
    found: Found = []
    for one in _schedules(args, hosts):
        predictor = Predictor(one)
        found.append((one, {size: predictor.times(size, machine, count) for size, count in segments.items()}))
    first = found[0][0]
    what = f"{first.collective} of {first.world} ranks, {described(first.hosts) or 'one host'}"
    print(f"{what}, on {machine.name!r}: predicted time in us, * the fastest at its size")
    _show(found, {size: segments[size] for size in shown})
    _explain(found, explained)
    if args.json:
        rows = [
            {"algorithm": one.algorithm, "bytes": size, "segments": segments[size], "seconds": sum(spent),
             "spent": spent._asdict(), "rounds": one.rounds, "uplink": str(uplink_load(one))}
            for one, times in found
            for size, spent in times.items()
        ]  # fmt: skip
        head = {"collective": first.collective, "world": first.world, "root": first.root, "hosts": list(first.hosts)}
        text = json.dumps({**head, "machine": machine.name, "rows": rows}, indent=1)
        outputs.write(args.json, text + "\n")
    if args.plot:
        drawn = {one.algorithm: {size: sum(times[size]) * 1e6 for size in shown} for one, times in found}
        with outputs.naming(args.plot):
            # else matplotlib takes what stands between two for a formula
            plot_times(drawn, args.plot, f"{what}, {machine.name}: predicted time".replace("$", r"\$"))
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
    algorithm_files.require_names_apart(own)
    collective = args.collective or (own[0].collective if own else "all_reduce")
    given = [one for one in load_given() if one.collective == collective]
    known = [name for name, of, _ in algorithms() if of == collective]
    for one in wanted or [*known, *given]:
        name = name_of(one)
        if isinstance(one, Algorithm) and one.collective != collective:
            raise InvalidUsage(f"{name} is an algorithm of {one.collective}, not of {collective}: leave it out")
        try:
            made = composed(name, collective, hosts, args.root)
        except NotImplementedError as error:  # it does not cover this world
            if wanted:
                raise InvalidUsage(f"{name}: {error}") from error
            continue
        except ScheduleError:
            raise
        except ValueError as error:
            near = "" if name in known else did_you_mean(name, known)
            raise InvalidUsage(f"{options.shown(name)}: {error}{near}") from error
        if registered(name, collective):
            made.prove()
        yield made


def _show(found: Found, segments: dict[int, int]) -> None:
    """Prints the times of all, and marks the fastest at each size."""
    best = {size: _micros(min(sum(times[size]) for _, times in found)) for size in segments}
    rows = []
    for one, times in found:
        shown = {size: _micros(sum(times[size])) for size in segments}
        cells = [text + ("*" if text == best[size] else " ") for size, text in shown.items()]
        rows.append((one.algorithm, *cells, str(one.rounds), f"{float(uplink_load(one)):g}"))
    if several := set(segments.values()) != {1}:
        rows.append(("(segments)", *(f"{count} " for count in segments.values()), "", ""))
    print_table(("schedule", *map(format_bytes, segments), "rounds", "uplink, S"), rows, words=(0,))
    print("uplink, S: what the busiest uplink carries, moment by moment, in sizes S of the message")
    if several:
        print("(segments): the pieces of a message that follow each other through the rounds, so that these overlap")
    print()


def _explain(found: Found, size: int) -> None:
    """Prints what all spend their time on at one size, the fastest first."""
    print(f"where the time goes at {format_bytes(size)}, in us")
    titles = ("latency", "messages", "bytes inside hosts", "bytes between hosts", "combining")
    spent = sorted(((one.algorithm, times[size]) for one, times in found), key=lambda row: sum(row[1]))
    rows = [(name, _micros(sum(times)), *map(_micros, times)) for name, times in spent]
    print_table(("schedule", "time", *titles), rows)
    print(_LEGEND, end="")


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
