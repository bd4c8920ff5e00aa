"""Results for people: a table in nccl-tests' columns, the summary of ratios, and the results page in Markdown.

Times are in microseconds and bandwidths in GB/s (10^9), medians over rounds of the median and the 99th percentile of
a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import repository
from .cases import LIMIT, MPI_PEERS, Config, format_bytes
from .results import (
    Comparison,
    Meta,
    Row,
    by_call,
    compare,
    config_of,
    geometric_mean,
    relative_to,
    wrong_elements,
)


@dataclass(frozen=True)
class Table:
    """Title, column names and rows of text; the first `left` columns are words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: int = 1


def measurements(rows: list[Row], meta: Meta) -> list[Table]:
    """One table per call: a line per size and configuration."""
    tables, limits = [], relative_to(LIMIT, rows)
    for call, here in by_call(rows):
        lines = []
        for row in here:
            times_limit = limits.get((call, row["bytes"], config_of(row)))
            lines.append(
                [
                    str(config_of(row)), row["transport"],
                    str(row["bytes"]), str(row["count"]), row["dtype"], row["op"],
                    time_text(row["time_us_min"]), time_text(row["time_us_p50"]), time_text(row["time_us_p99"]),
                    f"{row['algbw_gbps']:.3g}", f"{row['busbw_gbps']:.3g}",
                    *([] if not limits else ["" if times_limit is None else f"{times_limit:.2f}"]),
                    "n/a" if row["wrong"] is None else str(row["wrong"]),
                ]
            )  # fmt: skip
        columns = ["library", "transport", "size (B)", "count", "type", "redop", "min (us)", "p50 (us)", "p99 (us)"]
        where = f"{call.world} ranks{_oversubscribed(call.world, meta)}"
        title = f"{call}, {where}, medians of {here[0]['round']} rounds"
        tables.append(
            Table(title, [*columns, "algbw", "busbw", *(["p50/limit"] if limits else []), "#wrong"], lines, left=2)
        )
    return tables


def summary(rows: list[Row], meta: Meta) -> list[Table]:
    """One table per world and set of rivals: how many times faster each configuration is, size by size. A configuration
    with wrong elements has no ratio."""
    tables = []
    groups: dict[tuple[int, str], list[Comparison]] = {}
    for comparison in compare(rows):
        groups.setdefault((comparison.world, comparison.rivals), []).append(comparison)
    for (world, rivals), comparisons in sorted(groups.items()):
        sizes = sorted({size for comparison in comparisons for size in comparison.ratios})
        lines = [
            [format_bytes(size)] + [_ratio(comparison.ratios.get(size)) for comparison in comparisons] for size in sizes
        ]
        lines.append(["geometric mean"] + [_ratio(comparison.geometric_mean) for comparison in comparisons])
        lines += _overall(comparisons)
        present = sorted({row["library"] for row in rows if row["world"] == world and row["library"] in MPI_PEERS})
        among = f" ({', '.join(present)})" if rivals == "best MPI" else ""
        title = f"time of {rivals}{among} / time of ringlet, {world} ranks{_oversubscribed(world, meta)}"
        columns = ["size", *_headers(comparisons)]
        tables.append(Table(title + ": median over rounds of ratios within a round", columns, lines))
    return tables


def _headers(comparisons: list[Comparison]) -> list[str]:
    """The headers that distinguish the columns: configurations, calls, or both."""
    calls = {comparison.call for comparison in comparisons}
    collectives = {call.collective for call in calls}
    told = {call: str(call) if len(calls) > len(collectives) else call.collective for call in calls}
    configs = [str(comparison.config).removeprefix("ringlet ") for comparison in comparisons]
    if len(calls) == 1:
        return configs
    if len(set(configs)) == 1:
        return [told[comparison.call] for comparison in comparisons]
    return [f"{told[comparison.call]} {config}" for comparison, config in zip(comparisons, configs, strict=True)]


def _overall(comparisons: list[Comparison]) -> list[list[str]]:
    """A line with each configuration's mean over all collectives and sizes, in its first column; none for one."""
    if len({comparison.collective for comparison in comparisons}) == 1:
        return []
    ratios: dict[Config, list[float]] = {}
    for comparison in comparisons:
        ratios.setdefault(comparison.config, []).extend(comparison.ratios.values())
    told: dict[Config, str] = {config: _ratio(geometric_mean(found)) for config, found in ratios.items()}
    return [["of all collectives"] + [told.pop(comparison.config, "") for comparison in comparisons]]


def uplinks(rows: list[Row], meta: Meta) -> list[Table]:
    """On emulated hosts, one table per call that moves data: the bytes on the busiest uplink."""
    return repository.module("uplinks").tables(rows, meta) if meta.get("cluster") else []


def markdown(rows: list[Row], meta: Meta) -> str:
    """The results page: circumstances, then the summary, then every measurement."""
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    what = collectives[0] if len(collectives) == 1 else f"{len(collectives)} collectives"
    lines = [f"# {what} on {meta.get('machine', {}).get('name')}, {str(meta.get('date'))[:10]}", ""]
    lines += ["Written by `ringlet bench --report`.", "", *facts(meta)]
    rounds = 1 + max((row["round"] for row in rows), default=0)
    lines += [
        "",
        f"Libraries interleaved, {rounds} rounds; wrong elements: {wrong_elements(rows)}. Times are medians over "
        "rounds, in microseconds; a time is the maximum over ranks. Bandwidths in GB/s.",
    ]
    for table in [*uplinks(rows, meta), *summary(rows, meta), *measurements(rows, meta)]:
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
        *(repository.module("uplinks").facts(meta) if meta.get("cluster") else ()),
        ("command", f"`{meta.get('command')}`"),
        ("commit", str(meta.get("commit"))),
        ("date", str(meta.get("date"))),
        ("load average before", str(meta.get("load_before"))),
        ("versions", "; ".join(f"{name}: {version}" for name, version in meta.get("versions", {}).items())),
        *((f"settings of {name}", f"`{value}`") for name, value in meta.get("settings", {}).items()),
        *(repository.module("machine_limit").facts(meta["limit"]) if meta.get("limit") else ()),
        *((f"not measured: {name}", reason) for name, reason in meta.get("refused", {}).items()),
        *more.items(),
    ]  # fmt: skip
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in told)]


def _oversubscribed(world: int, meta: Meta) -> str:
    cores = meta.get("machine", {}).get("cores", world)
    return f" on {cores} cores (oversubscribed)" if world > cores else ""


def time_text(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"
