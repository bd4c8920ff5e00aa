#!/usr/bin/env python3
"""Shows what `ringlet bench --json` has written, and writes it as a page in Markdown.

python benchmarks/page.py out/main.jsonl                          the tables again
python benchmarks/page.py out/main.jsonl --page benchmarks/results/ --plot out/main.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ringlet.bench import report, results
from ringlet.bench.plot import plot
from ringlet.bench.results import Meta, Row
from ringlet.cli.bench import show

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import machine_limit, uplinks


def read(path: Path) -> tuple[list[Row], Meta]:
    """The rows of a .jsonl file and, if they lie beside it, the run's circumstances."""
    beside = results.meta_file(path)
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return rows, json.loads(beside.read_text()) if beside.exists() else {}


def tables(rows: list[Row], meta: Meta) -> list[report.Table]:
    first = [*uplinks.tables(rows, meta), *machine_limit.tables(rows)]
    return [*first, *report.summary(rows, meta), *report.measurements(rows, meta)]


def markdown(rows: list[Row], meta: Meta) -> str:
    """The results page: circumstances, then the summary, then every measurement."""
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    what = collectives[0] if len(collectives) == 1 else f"{len(collectives)} collectives"
    lines = [f"# {what} on {meta.get('machine', {}).get('name')}, {str(meta.get('date'))[:10]}", ""]
    lines += ["Written by `benchmarks/page.py`.", "", *facts(meta), ""]
    lines.append(
        f"Libraries interleaved, {1 + max(row['round'] for row in rows)} rounds; wrong elements: "
        f"{results.wrong_elements(rows)}. Times are medians over rounds, in microseconds; a time is the maximum over "
        "ranks. Bandwidths in GB/s."
    )
    for table in tables(rows, meta):
        lines += ["", f"## {table.title}", "", "| " + " | ".join(table.columns) + " |"]
        lines.append("|" + "".join("---|" if index < table.left else "---:|" for index in range(len(table.columns))))
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def facts(meta: Meta, **more: str) -> list[str]:
    """The circumstances of the figures, and remarks, as the lines of a table."""
    machine = meta.get("machine", {})
    told = [
        ("hardware", f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, "
                     f"Linux {machine.get('kernel')}"),
        *(uplinks.facts(meta) if meta.get("cluster") else ()),
        ("command", f"`{meta.get('command')}`"),
        ("commit", meta.get("commit")),
        ("date", meta.get("date")),
        ("load average before", meta.get("load_before")),
        ("versions", "; ".join(f"{name}: {version}" for name, version in meta.get("versions", {}).items())),
        *((f"settings of {name}", f"`{value}`") for name, value in meta.get("settings", {}).items()),
        *(machine_limit.facts(meta["limit"]) if meta.get("limit") else ()),
        *((f"not measured: {name}", reason) for name, reason in meta.get("refused", {}).items()),
        *more.items(),
    ]  # fmt: skip
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in told)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--page", type=Path, metavar="FILE", help="to FILE.md, or to DATE-MACHINE.md in a folder")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows, meta = read(args.rows)
    show(tables(rows, meta))
    if args.plot:
        plot(rows, args.plot)
    if args.page:
        file = args.page / f"{meta['date'][:10]}-{meta['machine']['name']}.md" if args.page.is_dir() else args.page
        file.write_text(markdown(rows, meta))


if __name__ == "__main__":
    main()
