"""Draws docs/pictures and writes the tables of docs/algorithms.md, all from the schedules themselves.

    make docs-pictures          (or: python docs/generate.py)

Deterministic: the same schedules give the same bytes. tests/python/test_docs.py compares what is committed with it.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from ringlet.schedule import algorithms, schedule
from ringlet.schedule.closed_forms import CLOSED_FORMS
from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.prove import Proof, prove

DOCS = Path(__file__).parent
WORLD = 4  # of the pictures
WORLDS = (4, 5, 16)  # of the tables: a power of two, an odd world, a larger power of two
MORE_PICTURES = [("all_reduce", "butterfly", 6), ("all_reduce", "circulant", 5)]
BEGIN = "<!-- table {}: written by docs/generate.py -->"
END = "<!-- end of table {} -->"


def pictures() -> dict[str, str]:
    """File name -> SVG, for every registered schedule and a few worlds that show more."""
    found = {f"{c}-{a}.svg": schedule(a, c, world=WORLD).svg() for a, c, _ in algorithms()}
    for collective, algorithm, world in MORE_PICTURES:
        found[f"{collective}-{algorithm}-world-{world}.svg"] = schedule(algorithm, collective, world=world).svg()
    return found


def tables() -> dict[str, str]:
    """Name of a table -> its Markdown."""
    rows = [(a, c) for a, c, _ in algorithms()]
    return {
        "all_reduce": _table([row for row in rows if row[1] == "all_reduce"], with_collective=False),
        "others": _table([row for row in rows if row[1] != "all_reduce"], with_collective=True),
    }


def _table(rows: list[tuple[str, str]], with_collective: bool) -> str:
    worlds = ", ".join(map(str, WORLDS))
    columns = ["algorithm", "rounds", "bytes sent", f"rounds at p = {worlds}", f"bytes sent / S at p = {worlds}"]
    columns += [f"depth at p = {worlds}", f"trees at p = {worlds}"]
    lines = [["collective", *columns] if with_collective else columns]
    lines.append(["---"] * len(lines[0]))
    for algorithm, collective in rows:
        proofs = [prove(schedule(algorithm, collective, world=world)) for world in WORLDS]
        form = CLOSED_FORMS[algorithm, collective]
        cells = [f"`{algorithm}`", form.rounds_text, form.sent_text, *_proved(proofs, collective in REDUCTIONS)]
        lines.append([f"`{collective}`", *cells] if with_collective else cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _proved(proofs: list[Proof], summed: bool) -> list[str]:
    """The cells that the prover found, world by world."""

    def cell(values: list[int] | list[Fraction]) -> str:
        return ", ".join(map(str, values))

    sums = [cell([p.depth for p in proofs]), cell([p.trees for p in proofs])] if summed else ["-", "-"]
    return [cell([p.rounds for p in proofs]), cell([p.sent for p in proofs]), *sums]


def with_tables(page: str) -> str:
    """The page with the text between each table's marks written anew. ValueError where a mark is missing."""
    for name, table in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin + "\n")
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"no marks of the table {name!r} in the page")
        page = f"{before}{begin}\n{table}{end}{after}"
    return page


def main() -> int:
    folder, page = DOCS / "pictures", DOCS / "algorithms.md"
    folder.mkdir(exist_ok=True)
    drawn = pictures()
    for stale in {path.name for path in folder.glob("*.svg")} - drawn.keys():
        (folder / stale).unlink()
    for name, svg in drawn.items():
        (folder / name).write_text(svg, encoding="utf-8")
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(drawn)} pictures in {folder}, {len(tables())} tables in {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
