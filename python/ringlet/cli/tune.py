"""`ringlet tune`: measures which algorithm is fastest when, and writes the table that groups then use."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringlet import _C
from ringlet.bench import results
from ringlet.bench.cases import OWN_OF_NCCL, BenchError, Sweep
from ringlet.bench.rules import Timing, derive, table_text
from ringlet.bench.run import Row
from ringlet.cli import algorithm_files, bench, options, outputs
from ringlet.errors import InvalidUsage
from ringlet.joining import default_transport
from ringlet.schedule import Algorithm
from ringlet.schedule.loading import load_given

_EXAMPLES = """\
ringlet tune                            two ranks of this machine; groups use the table from then on
ringlet tune --world 2,4 -e 4M -o four  into a file, for RINGLET_TABLE=four
ringlet tune --device cuda --world 8    up to which size do calls on GPUs go through peers' memory?
ringlet tune mine.py -o mine            is your own algorithm faster, and when?
ringlet tune --show                     the table in force

Rank 0's table counts for all ranks of a group. RINGLET_TABLE names another file. If it is empty, ringlet
uses the built-in rules only."""


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "tune", tune_command,
        help="measure algorithms, and write the table of rules for `auto`",
        description="Measure all algorithms of each collective over sizes, interleaved, and write a rule for `auto` "
        "for each range of sizes in which another algorithm than the built-in choice is faster. On GPUs: measure "
        "peers' memory and NCCL, and write a rule for each range in which the other one is faster.",
        examples=_EXAMPLES,
    )  # fmt: skip
    parser.instead = {"--hosts": bench.INSTEAD["--hosts"]}
    parser.set_defaults(sweep=Sweep)
    parser.add_argument("files", nargs="*", type=algorithm_files.of_file, metavar="FILE",
        help=f"measure the algorithms of these files too: {algorithm_files.FILES}")  # fmt: skip
    parser.add_argument("--show", action="store_true", help="print the table in force and its origin, measure nothing")
    options.add(parser, "worlds", help="numbers of ranks: 2,4,8-16 (default 2)")
    for name in ("transport", "device"):
        options.add(parser, name)
    options.add(parser, "collectives",
        help=f"collectives to measure (default {','.join(alternatives())}, or those of the files)")  # fmt: skip
    for name, default in (("begin", "1K"), ("end", "64M"), ("factor", 4), ("rounds", 7), ("ms", 20.0)):
        options.add(parser, name, default=default)
    options.add(parser, "margin")
    options.add(parser, "output", type=options.file(),
        help="write the table to FILE (default: the table that groups use)")  # fmt: skip


def tune_command(args: argparse.Namespace) -> int:
    """Returns 0: done; 2: cannot run, a rank died, or an algorithm's results were wrong."""
    if args.show:
        print(in_force(), end="")
        return 0
    sweeps = list(_sweeps(args))
    output = args.output or _usual_place()
    # The lines of sizes that its user has written stay, and count while algorithms are measured.
    sizes = "".join(f"{line}\n" for line in outputs.table_text(output).splitlines() if line.split()[:1] == ["tuned"])
    for sweep in sweeps:
        bench.require_able(sweep)
    outputs.check({"-o": output}, make_folders=args.output is None)
    rows, meta = _measure(sweeps, sizes)
    rules = derive(_timings(rows, sweeps[0].medium, sizes), _C.chosen, args.margin / 100)
    own = algorithm_files.comment(rule.algorithm for rule in rules)
    text = _heading(meta, args.margin) + sizes + own + table_text(rules)
    outputs.write_table(output, text)
    print(text, end="")
    told = f"{len(rules)} rule{'s' if len(rules) > 1 else ''} before the built-in ones"
    if not rules:
        told = "the built-in choice is right wherever it was measured"
    print(f"wrote {output}: {told}", file=sys.stderr)
    return 0


def in_force() -> str:
    """The rules of a group whose rank 0 is this process, in their order, as text."""
    load_given()  # rules may name them
    try:
        file, text = _C.given_table()
    except UnicodeDecodeError as error:
        raise InvalidUsage(outputs.not_text(_C.table_file())) from error
    if text:
        given = f"# from {file}\n{text.rstrip()}\n"
    else:
        given = f"# no rules given: {file} is empty or not there\n" if file else "# no rules given\n"
    return f"{given}\n# built in\n{_C.built_in_rules()}"


def alternatives(own: Iterable[Algorithm] = ()) -> dict[str, tuple[str, ...]]:
    """By collective: its algorithms, if there is more than one."""
    known: dict[str, list[str]] = defaultdict(list)
    for name, collective, _ in _C.algorithms():
        known[collective].append(name)
    for one in own:
        known[one.collective].append(one.name)
    return {collective: tuple(names) for collective, names in known.items() if len(names) > 1}


def _timings(rows: Iterable[Row], over_tcp: str, sizes: str) -> Iterator[Timing]:
    """The measured times of each algorithm, by situation. over_tcp: the medium of TCP. sizes: lines of a table, with
    which they were measured."""
    found: dict[tuple[str, str, int, int, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        medium = _medium(row, over_tcp)
        # On GPUs, of what `auto` goes through, as the ranks are told, and of NCCL's own collective.
        way = "peers" if medium == "gpus" and row["algorithm"] != "nccl" else row["algorithm"]
        key = (row["collective"], medium, row["world"], row["bytes"], way)
        # Small messages go through stages in both kinds of memory; once is enough.
        if medium != "registered" or row["bytes"] > _small_bytes(row["world"], sizes):
            found[key][row["round"]] = row["time_us_p50"]
    return (Timing(*key, times) for key, times in found.items())


def _small_bytes(world: int, table: str = "") -> int:
    """Up to this size messages go through stages even if tensors are registered."""
    return _C.tuned(table, _C.processor_model())["small_bytes_of_two" if world == 2 else "small_bytes"]


def _medium(row: Row, over_tcp: str) -> str:
    if row["transport"].startswith("cuda"):
        return "gpus"
    if row["transport"] == "shared_memory":
        return "registered" if row["memory"] == "registered" else "staged"
    return over_tcp


def _sweeps(args: argparse.Namespace) -> Iterator[Sweep]:
    """One a collective, since each has algorithms of its own. On GPUs, one a world, whose ranks find together what they
    have: all calls through peers' memory, whatever their size, and NCCL's own collectives."""
    worlds = args.worlds or (2,)
    if min(worlds) < 2:
        raise BenchError("--world 1: a single rank has no algorithm to choose: give 2 or more")
    names = ("begin_bytes", "end_bytes", "factor", "rounds", "sample_ms", "device")
    sweep = args.sweep(worlds=worlds, memory=("ordinary",), **{name: getattr(args, name) for name in names})
    if args.device != "cpu":
        if args.transport or args.files:
            raise BenchError("--device cuda: peers' memory and NCCL are measured: leave out --transport and files")
        for one in args.collectives or ():
            if one not in OWN_OF_NCCL:
                raise BenchError(f"--collective: NCCL has no {one} of its own; give one of {', '.join(OWN_OF_NCCL)}")
        for world in worlds:
            yield replace(
                sweep, worlds=(world,), collectives=args.collectives or OWN_OF_NCCL, algorithms=("auto", "nccl"),
                variables={"RINGLET_PEER_MEMORY_BYTES": str(1 << 60)},
            )  # fmt: skip
        return
    transport = args.transport or default_transport()
    in_place = args.end_bytes > min(map(_small_bytes, worlds)) and transport != "tcp"
    memory = ("registered", "ordinary") if in_place else ("ordinary",)
    own = list(dict.fromkeys(one for made in args.files for one in made))
    algorithm_files.require_names_apart(own)
    known = alternatives(own)
    for collective in args.collectives or dict.fromkeys(one.collective for one in own) or known:
        if collective not in known:
            raise BenchError(f"--collective: {collective} has only one algorithm; give one of {', '.join(known)}")
        yield replace(
            sweep, collectives=(collective,), algorithms=known[collective], memory=memory, transport=transport
        )


def _measure(sweeps: Iterable[Sweep], sizes: str) -> tuple[list[Row], dict[str, Any]]:
    """sizes: lines of a table, with which the ranks are measured. BenchError for wrong results."""
    rows: list[Row] = []
    meta: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ringlet-tune-") as folder:
        table = Path(folder) / "table"
        table.write_text(sizes, encoding="utf-8")
        for sweep in sweeps:
            # A wrong table of the user must not keep a better one from being measured.
            measured, meta = bench.measure(replace(sweep, variables={**sweep.variables, "RINGLET_TABLE": str(table)}))
            _check_ways(sweep, meta)
            results.require_right(measured)
            rows += measured
    return rows, meta


def _check_ways(sweep: Sweep, meta: dict[str, Any]) -> None:
    """BenchError if GPUs had one of the two ways only: then there is no limit between them."""
    used = meta["versions"]["ringlet"]
    if sweep.device != "cpu" and "peer memory up to" not in used:
        raise BenchError(f"--device: a limit needs peers' memory and NCCL, and {sweep.worlds[0]} ranks had {used}")


def _usual_place() -> Path:
    file = _C.table_file()
    if not file:
        raise BenchError("RINGLET_TABLE is empty, so no table is in use here: give -o FILE")
    return Path(file)


def _heading(meta: dict[str, Any], margin: float) -> str:
    machine = meta["machine"]
    return (
        f"# {meta['command']}\n"
        f"# {meta['date']}, {machine['processor']}, {machine['cores']} cores, commit {meta['commit']}\n"
        f"# Rules that gain at least {margin:g} % on the built-in choice, in the median of ratios within a round.\n"
    )
