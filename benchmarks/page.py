"""Pages of results: of `ringlet bench --json`, and what the other programs here need to write theirs.

python -m benchmarks.page out/main.jsonl                          the tables again
python -m benchmarks.page out/main.jsonl --page benchmarks/results/ --plot out/main.svg
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine_limit, uplinks

from ringlet.bench import report, results
from ringlet.bench.plot import plot
from ringlet.bench.results import Meta, Row
from ringlet.bench.run import Outcome
from ringlet.cli import outputs
from ringlet.cli.bench import show


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
        lines += ["", f"## {table.title}", "", *markdown_table(table.columns, table.rows, table.left)]
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
    return markdown_table(("", ""), told, left=2)


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]], left: int) -> list[str]:
    """The lines of a table; the first `left` columns are words."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return [markdown_row(cells) for cells in (head, rule, *rows)]


def markdown_row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def parse(parser: argparse.ArgumentParser, rows: bool = True) -> argparse.Namespace:
    """The options, with --report, for a program with rows --json, and `load`, the load average before the run. Refuses
    what cannot be written."""
    parser.set_defaults(load=os.getloadavg()[0], json=None)
    if rows:
        parser.add_argument("--json", type=Path, help="a row a line, to this file; circumstances to .meta.json")
    parser.add_argument("--report", type=Path, help="a page in Markdown, to this file, or into this folder")
    options = parser.parse_args()
    page = options.report / "page.md" if options.report and options.report.is_dir() else options.report
    outputs.check({"--json": options.json, "--report": page}, make_folders=True)
    return options


def write(
    options: argparse.Namespace,
    kind: str,
    title: str,
    lines: Iterable[str],
    rows: Iterable[Mapping[str, Any]] = (),
    outcome: Outcome | None = None,
    **more: str,
) -> None:
    """Writes what the options of `parse` ask for: rows with their circumstances, and a page, in a folder as
    DATE-MACHINE-KIND.md. more: for `facts`."""
    meta = results.circumstances(options.load, outcome)
    day, machine, file = meta["date"][:10], meta["machine"]["name"], options.report
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
        results.write_meta(options.json, meta)
    if file:
        file = file / f"{day}-{machine}-{kind}.md" if file.is_dir() else file
        text = [f"# {title} on {machine}, {day}", ""]
        text += [f"Written by `benchmarks/{Path(sys.argv[0]).name}`, which says what is measured.", ""]
        text += [*facts(meta, **more), "", *lines]
        file.write_text("\n".join(text) + "\n", encoding="utf-8")
        print(f"wrote {file}")


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
