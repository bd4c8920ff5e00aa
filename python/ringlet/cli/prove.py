"""`ringlet prove`: the prover from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ringlet.cli import algorithm_files, options, outputs
from ringlet.cli.terminal import print_table, progress, require_rich
from ringlet.errors import InvalidUsage
from ringlet.log import ranges
from ringlet.schedule import ScheduleError
from ringlet.schedule.closed_forms import CLOSED_FORMS, shown
from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.prove import Proof
from ringlet.schedule.prove_all import prove_all

COLUMNS = (
    *("algorithm", "collective", "worlds", "rounds", "sent per rank"),
    *("depth", "trees", "same bits", "deadlock-free", "closed forms"),
)


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "prove", prove_command,
        help="prove schedules correct for every world",
        description="Prove by symbolic execution that each schedule computes its collective, and print a table.",
        examples="ringlet prove\nringlet prove --world 2-9,16 --algorithm ring,butterfly\nringlet prove mine.py",
    )  # fmt: skip
    parser.add_argument("files", nargs="*", default=[], metavar="FILE",
        help=f"prove only the algorithms of these files: {algorithm_files.FILES}")  # fmt: skip
    sizes = parser.add_mutually_exclusive_group()
    options.add(sizes, "worlds", default="1-64", help="numbers of ranks: 5, 1-64 or 2,3,8-16 (default 1-64)")
    options.add(sizes, "hosts")
    options.add(parser, "algorithms", type=algorithm_files.built_in_or_given,
        help="only these, e.g. ring,butterfly")  # fmt: skip
    options.add(parser, "collectives")
    options.add(parser, "json", help="also write the table to FILE, for programs")


def prove_command(args: argparse.Namespace) -> int:
    """Proves and prints a table; returns 1 with a message if a schedule is wrong, 2 if the arguments are."""
    require_rich()
    outputs.check({"--json": args.json})
    own = list(dict.fromkeys(one for file in args.files for one in algorithm_files.read(file)))
    algorithm_files.require_names_apart(own, "prove")
    collectives = args.collectives or tuple(dict.fromkeys(one.collective for one in own))
    told: dict[str, Any] = {"proved": True}
    try:
        with progress("proving") as watch:
            worlds = [len(args.hosts)] if args.hosts else args.worlds
            proofs = prove_all(worlds, watch, (*(args.algorithms or ()), *own), collectives, args.hosts)
    except ScheduleError as error:
        print(f"not proved: {error}", file=sys.stderr)
        places = ("schedule", "rank", "round", "chunk", "message")
        told = {"proved": False, "error": {key: getattr(error, key) for key in places}}
    except ValueError as error:
        raise InvalidUsage(str(error)) from error
    else:
        told["rows"] = rows = _rows(proofs)
        told["proofs"] = [{**vars(proof), "sent": str(proof.sent)} for proof in proofs]
        print_table(COLUMNS, [list(row.values()) for row in rows], words=range(len(COLUMNS)))
    if args.json:
        outputs.write(args.json, json.dumps(told) + "\n")
    return 0 if told["proved"] else 1


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
            ranges({p.world for p in group}),
            shown(form.rounds) if form else _span([p.rounds for p in group]),
            shown(form.sent) if form else _span([p.sent for p in group]) + " S",
            _span([p.depth for p in group]) if summed else "-",
            _span([p.trees for p in group]) if summed else "-",
            "yes" if summed else "-",
            "yes",
            "agree" if form else "none on file",
        )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def _span(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"
