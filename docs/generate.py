"""Draws docs/pictures, and writes the tables and figures of the pages: from schedules, csrc/ and benchmarks/.

    make docs-pictures          (or: python docs/generate.py)

Deterministic: the same schedules give the same bytes. tests/tools/test_docs.py compares what is committed with it.
"""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from pathlib import Path

from ringlet import _C
from ringlet.schedule import algorithms, schedule
from ringlet.schedule.closed_forms import CLOSED_FORMS, shown
from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.cost import uplink_load
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.prove import Proof, prove

DOCS = Path(__file__).parent
sys.path += [str(DOCS), str(DOCS.parent), str(DOCS.parent / "tests" / "conformance")]
from benchmarks.page import markdown_table  # noqa: E402

import conformance_tables  # noqa: E402
import fastest  # noqa: E402
import figures  # noqa: E402
import orders  # noqa: E402

WORLD = 4  # of the pictures
WORLDS = (4, 5, 16)  # of the tables: a power of two, an odd world, a larger power of two
ON_HOSTS = {"hierarchical": parse_hosts("2x2")}  # pictures of what would look like another on one host
UPLINKS = ("4x2", "4x4", "8x2", "4x8")  # hosts x ranks of the table of loads
MORE_PICTURES = [
    ("all_reduce", "butterfly", 6),
    ("all_reduce", "circulant", 5),
    ("all_reduce", "swing", 5),
    ("all_reduce", "swing", 8),
    ("all_reduce", "recursive_multiplying", 8),
    ("all_reduce", "double_binary_tree", 6),
    ("all_reduce", "torus", 6),
]
BEGIN = "<!-- table {}: written by docs/generate.py -->"
END = "<!-- end of table {} -->"
LIMIT = re.compile(r"constexpr [\w:]+ (k\w+) = ([^;]+);\s*///< ((?:.|\n\s*///< )*)")
FIGURE = re.compile(r"(<!-- figure ([^>]+?) -->)[^<]*(<!---->)")


def pictures() -> dict[str, str]:
    """File name -> SVG, for every registered schedule and a few worlds that show more."""
    found = {f"{c}-{a}.svg": schedule(a, c, world=WORLD, hosts=ON_HOSTS.get(a)).svg() for a, c, _ in algorithms()}
    for collective, algorithm, world in MORE_PICTURES:
        found[f"{collective}-{algorithm}-world-{world}.svg"] = schedule(algorithm, collective, world=world).svg()
    found["reveal-gloo-and-openmpi.svg"] = orders.picture()
    return found


def tables() -> dict[str, dict[str, str]]:
    """Page -> name of a table in it -> the table's Markdown."""
    rows = [(a, c) for a, c, _ in algorithms()]
    reductions = [row for row in rows if row[1] == "all_reduce"]
    return {
        "algorithms.md": {
            "all_reduce": _algorithms(reductions, with_collective=False),
            "others": _algorithms([row for row in rows if row not in reductions], with_collective=True),
            "uplinks": _uplinks([algorithm for algorithm, _ in reductions]),
            "modelled": _table(fastest.modelled()),
            "winners": _table(fastest.winners()),
            "measured": _table(fastest.measured()),
            "auto": _rules(),
        },
        "limits.md": {"limits": _limits()},
        "failure.md": _health(),
        "conformance.md": {name: _table(lines) for name, lines in conformance_tables.tables().items()},
        **{
            page: {name: _table(lines) for name, lines in found.items()}
            for page, found in (*figures.tables().items(), *orders.tables().items())
        },
    }


def _table(lines: list[list[str]]) -> str:
    """Markdown of a header and its lines."""
    return "\n".join(markdown_table(lines[0], lines[1:], left=len(lines[0]))) + "\n"


def _algorithms(rows: list[tuple[str, str]], with_collective: bool) -> str:
    worlds = ", ".join(map(str, WORLDS))
    columns = ["algorithm", "rounds", "bytes sent", f"rounds at p = {worlds}", f"bytes sent / S at p = {worlds}"]
    columns += [f"depth at p = {worlds}", f"trees at p = {worlds}"]
    lines = [["collective", *columns] if with_collective else columns]
    for algorithm, collective in rows:
        proofs = [prove(schedule(algorithm, collective, world=world)) for world in WORLDS]
        form = CLOSED_FORMS[algorithm, collective]
        cells = [f"`{algorithm}`", shown(form.rounds), shown(form.sent), *_proved(proofs, collective in REDUCTIONS)]
        lines.append([f"`{collective}`", *cells] if with_collective else cells)
    return _table(lines)


def _proved(proofs: list[Proof], summed: bool) -> list[str]:
    """The cells that the prover found, world by world."""

    def cell(values: list[int] | list[Fraction]) -> str:
        return ", ".join(map(str, values))

    sums = [cell([p.depth for p in proofs]), cell([p.trees for p in proofs])] if summed else ["-", "-"]
    return [cell([p.rounds for p in proofs]), cell([p.sent for p in proofs]), *sums]


def _uplinks(names: list[str]) -> str:
    """What all-reduces ask of the busiest uplink: by rank number on two numberings, and as they are run."""
    blocks = [parse_hosts(shape) for shape in UPLINKS]
    cyclic = [parse_hosts(f"{shape}:cyclic") for shape in UPLINKS]
    columns = ("block, by rank number", "cyclic, by rank number", "as run, block or cyclic")
    lines = [["algorithm", *(f"{column}: {', '.join(UPLINKS)}" for column in columns)]]
    for name in names:
        by_number = [[uplink_load(schedule(name, world=len(h)), h) for h in hosts] for hosts in (blocks, cyclic)]
        cells = [_decimals(loads) if name != "hierarchical" else "-" for loads in by_number]
        lines.append([f"`{name}`", *cells, _decimals([uplink_load(schedule(name, hosts=h)) for h in blocks])])
    bound = [2 - Fraction(2, len(set(hosts))) for hosts in blocks]
    return _table([*lines, ["least possible", "", "", _decimals(bound)]])


def _decimals(values: list[Fraction]) -> str:
    return ", ".join(f"{float(value):g}" for value in values)


def _rules() -> str:
    """The built-in rules, as they are written."""
    return f"```\n{_C.built_in_rules()}```\n"


def _limits() -> str:
    """The constants of csrc/ that a user may want to know: those with a comment `///<`, which says what they limit."""
    lines = [["constant", "value", "what it says"]]
    csrc = DOCS.parent / "csrc"
    for path in sorted(path for ending in ("h", "cc", "cuh", "cu") for path in csrc.rglob(f"*.{ending}")):
        for name, value, told in LIMIT.findall(path.read_text(encoding="utf-8")):
            link = f"[`{name}`](../{path.relative_to(DOCS.parent)})"
            lines.append([link, _amount(name, value), re.sub(r"\s*///<", "", told)])
    return _table(lines)


def _health() -> dict[str, str]:
    """The states and events of a group's health, and what follows, as csrc/engine/health.h has them."""
    text = _source("engine/health.h")
    found = {}
    for name in ("State", "Event", "Act"):
        body = re.search(rf"enum class {name} : uint8_t {{(.*?)\n  }};", text, re.DOTALL)
        if not body:
            raise ValueError(f"csrc/engine/health.h has no enum {name}")
        entries = re.findall(r"^ {4}(\w+),(?:\s*///< ((?:.|\n\s*///< )*))?$", body[1], re.MULTILINE)
        lines = [[f"`{entry}`", re.sub(r"\s*///<", "", told) or "nothing follows"] for entry, told in entries]
        found[f"{name.lower()}s"] = _table([[name.lower(), "what it means"], *lines])
    rows = re.findall(r"{(\w+), (\w+), (\w+), (\w+)}", text)
    states = list(dict.fromkeys(row[0] for row in rows))
    follows = {(from_, event): f"{act}, {to}" if to != from_ else act for from_, event, to, act in rows}
    events = list(dict.fromkeys(row[1] for row in rows))
    table = [[f"`{event}`", *(follows[state, event] for state in states)] for event in events]
    found["transitions"] = _table([["event", *(f"in `{state}`" for state in states)], *table])
    return found


def _source(path: str) -> str:
    return (DOCS.parent / "csrc" / path).read_text(encoding="utf-8")


def _amount(name: str, expression: str) -> str:
    """`size_t{256} << 10` of something called ...Bytes -> "256 KiB"."""
    expression = re.sub(r"std::chrono::milliseconds\((\d+)\)", r"\1ms", expression)
    if duration := re.fullmatch(r"(\d+)(us|ms|s)", expression):
        return f"{duration[1]} {duration[2].replace('u', 'µ')}"
    number, _, shift = re.sub(r"size_t\{(\d+)\}|'", r"\1", expression).partition("<<")
    value = int(number) << int(shift or 0)
    if name.endswith("Nanoseconds"):
        return f"{value / 1e6:g} ms"
    if name.endswith("Ms"):
        return f"{value} ms"
    if not (shift or name.endswith("Bytes")):
        return str(value)
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % size == 0:
            return f"{value // size} {unit}"
    return f"{value} bytes"


def with_tables(page: str, found: dict[str, str]) -> str:
    """The page with the text between each table's marks written anew. ValueError where a mark is missing."""
    for name, table in found.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin + "\n")
        _, marked, after = rest.partition(end)
        if not marked:
            raise ValueError(f"no marks of the table {name!r} in the page")
        page = f"{before}{begin}\n{table}{end}{after}"
    return page


def with_figures(page: str) -> str:
    """The page with every figure that stands between marks within a sentence written anew. KeyError: no such figure."""
    found = figures.figures()
    return FIGURE.sub(lambda mark: f"{mark[1]}{found[mark[2]]}{mark[3]}", page)


def main() -> int:
    folder = DOCS / "pictures"
    folder.mkdir(exist_ok=True)
    drawn = pictures()
    for stale in {path.name for path in folder.glob("*.svg")} - drawn.keys():
        (folder / stale).unlink()
    for name, svg in drawn.items():
        (folder / name).write_text(svg, encoding="utf-8")
    for page, found in tables().items():
        text = with_figures(with_tables((DOCS / page).read_text(encoding="utf-8"), found))
        (DOCS / page).write_text(text, encoding="utf-8")
    print(f"{len(drawn)} pictures in {folder}, tables in {', '.join(tables())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
