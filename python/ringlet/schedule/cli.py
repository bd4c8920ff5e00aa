"""`ringlet prove` and `ringlet draw`: the prover and the pictures from the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ringlet.schedule import ScheduleError, schedule
from ringlet.schedule.closed_forms import CLOSED_FORMS
from ringlet.schedule.collectives import COLLECTIVES, REDUCTIONS
from ringlet.schedule.draw import svg, text
from ringlet.schedule.hosts import SYNTAX, Hosts, parse_hosts
from ringlet.schedule.prove import Proof, prove_all

COLUMNS = (
    *("algorithm", "collective", "worlds", "rounds", "sent per rank"),
    *("depth", "trees", "same bits", "deadlock-free", "closed forms"),
)

Progress = Callable[[int, int, str], None]


def add_parsers(subparsers: Any) -> None:
    """Adds `prove` and `draw`; each sets `run`, a function of the parsed arguments that returns the exit code."""
    proves = subparsers.add_parser("prove", help="prove schedules correct for every world size")
    sizes = proves.add_mutually_exclusive_group()
    sizes.add_argument("--worlds", type=parse_worlds, default=parse_worlds("1-64"), help="1-64 (default), 5, 2,3,8-16")
    sizes.add_argument("--hosts", type=_hosts, help=SYNTAX)
    proves.add_argument("--algorithm", help="only this one, e.g. ring")
    proves.add_argument("--collective", choices=COLLECTIVES, help="only this one")
    proves.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the table to FILE, for programs")
    proves.set_defaults(run=prove_command)
    draws = subparsers.add_parser("draw", help="draw a schedule as SVG or text")
    draws.add_argument("algorithm", help="e.g. ring")
    draws.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    size = draws.add_mutually_exclusive_group()
    size.add_argument("--world", type=int, help="number of ranks (default 4)")
    size.add_argument("--hosts", type=_hosts, help=SYNTAX)
    draws.add_argument("--root", type=int, default=0)
    draws.add_argument("--rank-free", action="store_true", help="any one rank r, where all do the same")
    draws.add_argument("-o", "--output", type=pathlib.Path, metavar="FILE.svg", help="write an SVG picture")
    draws.add_argument("--text", action="store_true", help="print the picture in characters (default without -o)")
    draws.set_defaults(run=draw_command)


def prove_command(args: argparse.Namespace) -> int:
    """Proves and prints a table; 1 with the message where a schedule is wrong, 2 where the arguments are."""
    try:
        with _progress() as progress:
            worlds = [len(args.hosts)] if args.hosts else args.worlds
            proofs = prove_all(worlds, progress, args.algorithm, args.collective, args.hosts)
    except ScheduleError as error:
        print(f"not proved: {error}", file=sys.stderr)
        if args.json:
            wrong = {"schedule": error.schedule, "rank": error.rank, "round": error.round, "chunk": error.chunk}
            args.json.write_text(json.dumps({"proved": False, "error": {**wrong, "message": error.message}}) + "\n")
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = _rows(proofs)
    _print_table(rows)
    if args.json:
        args.json.write_text(json.dumps({"proved": True, "rows": rows, "proofs": [_plain(p) for p in proofs]}) + "\n")
    return 0


def draw_command(args: argparse.Namespace) -> int:
    """Draws one schedule; 2 with the message where there is none."""
    try:
        world = len(args.hosts) if args.hosts else 4 if args.world is None else args.world
        drawn = schedule(args.algorithm, args.collective, world=world, root=args.root, hosts=args.hosts)
        if args.output:
            args.output.write_text(svg(drawn, rank_free=args.rank_free), encoding="utf-8")
            print(f"{args.output}: {drawn.name}")
        if args.text or not args.output:
            print(text(drawn, rank_free=args.rank_free), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse_worlds(words: str) -> list[int]:
    """ "1-4,8" -> [1, 2, 3, 4, 8]"""
    worlds: set[int] = set()
    for word in words.split(","):
        first, _, last = word.partition("-")
        try:
            worlds |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            text = f"{word!r} is no world or range of worlds; write 5, 1-64 or 2,3,8-16"
            raise argparse.ArgumentTypeError(text) from None
    if not worlds or min(worlds) < 1:
        raise argparse.ArgumentTypeError(f"{words!r} has no worlds, or one below 1")
    return sorted(worlds)


def _hosts(words: str) -> Hosts:
    try:
        return parse_hosts(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rows(proofs: list[Proof]) -> list[dict[str, str]]:
    """One row for each algorithm and collective, in the registry's order."""
    groups: dict[tuple[str, str], list[Proof]] = {}
    for proof in proofs:
        groups.setdefault((proof.algorithm, proof.collective), []).append(proof)
    rows = []
    for (algorithm, collective), group in groups.items():
        form = CLOSED_FORMS.get((algorithm, collective)) if all(p.closed_form for p in group) else None
        summed = collective in REDUCTIONS
        cells = (
            algorithm,
            collective,
            _worlds_text([p.world for p in group]),
            form.rounds_text if form else _span([p.rounds for p in group]),
            form.sent_text if form else _span([p.sent for p in group]) + " S",
            _span([p.depth for p in group]) if summed else "-",
            _span([p.trees for p in group]) if summed else "-",
            "yes" if summed else "-",
            "yes",
            "agree" if form else "none on file",
        )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def _worlds_text(worlds: list[int]) -> str:
    """[1, 2, 3, 8] -> "1-3,8" """
    ranges: list[list[int]] = []
    for world in sorted(set(worlds)):
        if ranges and ranges[-1][1] == world - 1:
            ranges[-1][1] = world
        else:
            ranges.append([world, world])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _span(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _plain(proof: Proof) -> dict[str, Any]:
    return {**vars(proof), "sent": str(proof.sent)}


def _print_table(rows: list[dict[str, str]]) -> None:
    """With rich on a terminal; in plain columns otherwise, or without it."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.table import Table

            table = Table(*COLUMNS)
            for row in rows:
                table.add_row(*row.values())
            Console().print(table)
            return
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in COLUMNS]
    for cells in [COLUMNS, *(tuple(row.values()) for row in rows)]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar on a terminal, where rich is there."""
    try:
        from rich.progress import Progress as Bar
    except ImportError:
        yield None
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("proving")

        def update(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"proving {name}" if name else "proved")

        yield update
