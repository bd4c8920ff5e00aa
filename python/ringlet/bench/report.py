"""Results for people: a table in nccl-tests' columns, the summary of ratios, and the results page in Markdown.

Times are in microseconds and bandwidths in GB/s (10^9), medians over rounds of the median and the 99th percentile of
a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cases import MPI_PEERS, STREAM, Config, format_bytes, uplink_factor
from .clusters import Cluster
from .results import (
    Call,
    Comparison,
    Meta,
    Row,
    call_of,
    compare,
    config_of,
    geometric_mean,
    median_rows,
    over_limit,
    over_stream,
    wrong_elements,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Title, column names and rows of text; the first `left` columns are words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: int = 1


def measurements(rows: list[Row], meta: Meta) -> list[Table]:
    """One table per call: a line per size and configuration."""
    tables, limits = [], over_limit(rows)
    for call, here in _by_call(rows):
        lines = []
        for row in here:
            times_limit = limits.get((call, row["bytes"], config_of(row)))
            lines.append(
                [
                    str(config_of(row)), row["transport"],
                    str(row["bytes"]), str(row["count"]), row["dtype"], row["op"],
                    _time(row["time_us_min"]), _time(row["time_us_p50"]), _time(row["time_us_p99"]),
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


def _by_call(rows: list[Row]) -> list[tuple[Call, list[Row]]]:
    """The medians of each call: the worlds ascending, the collectives in their order."""
    merged: dict[Call, list[Row]] = {call: [] for call in dict.fromkeys(map(call_of, rows))}
    for row in median_rows(rows):
        merged[call_of(row)].append(row)
    return sorted(merged.items(), key=lambda one: one[0].world)


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
    """On emulated hosts, one table per call that moves data: the bytes on the busiest uplink, and times in those of a
    plain stream, against the bound."""
    if not meta.get("cluster"):
        return []
    cluster = Cluster(**meta["cluster"])
    tables, times = [], over_stream(rows)
    for call, here in _by_call(rows):
        if cluster.hosts < 2 or call.world != cluster.world:  # of another cluster: its bound is another one
            continue
        least, lines = uplink_factor(call.collective, cluster), []
        for row in here:
            ratio, crossed = times.get((call, row["bytes"], config_of(row))), row["uplink_bytes"]
            if row["library"] == STREAM or row["bytes"] == 0 or crossed is None:
                continue
            lines.append(
                [
                    str(config_of(row)), str(row["bytes"]), _time(row["time_us_p50"]), f"{crossed:.0f}",
                    f"{crossed / row['bytes']:.3f}", "" if ratio is None else f"{ratio:.3f}",
                    "" if ratio is None else f"{least / ratio:.1%}",
                ]
            )  # fmt: skip
        title = f"{call}: busiest uplink of {cluster}; the least that one must carry is {least:.3f} buffers"
        columns = ["library", "size (B)", "p50 (us)", "uplink (B)", "in buffers", "p50 in streams", "of the bound"]
        tables += [Table(title, columns, lines)] if lines else []
    return tables


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
        *_cluster_facts(meta),
        ("command", f"`{meta.get('command')}`"),
        ("commit", str(meta.get("commit"))),
        ("date", str(meta.get("date"))),
        ("load average before", str(meta.get("load_before"))),
        ("versions", "; ".join(f"{name}: {version}" for name, version in meta.get("versions", {}).items())),
        *((f"settings of {name}", f"`{value}`") for name, value in meta.get("settings", {}).items()),
        *_limit_facts(meta),
        *((f"not measured: {name}", reason) for name, reason in meta.get("refused", {}).items()),
        *more.items(),
    ]  # fmt: skip
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in told)]


def _cluster_facts(meta: Meta) -> list[tuple[str, str]]:
    if not meta.get("cluster"):
        return []
    return [
        ("emulated cluster", f"{Cluster(**meta['cluster'])} (network namespaces of this machine, tbf)"),
        ("congestion control", str(meta.get("congestion_control"))),
    ]


def _limit_facts(meta: Meta) -> list[tuple[str, str]]:
    if not meta.get("limit"):
        return []
    found = meta["limit"]
    told = (
        f"a line there and back {1000 * found['line_round_trip_us']:.0f} ns; a core reads what the other has just "
        f"written at {found['read_written_gbps']:.1f} GB/s; each core moves {found['copy_gbps']:.1f} GB/s in a copy of "
        f"{format_bytes(found['memory_bytes'])}, {found['add_gbps']:.1f} GB/s in read + read + write"
    )
    return [("the limit's measurements", told)]


def _oversubscribed(world: int, meta: Meta) -> str:
    cores = meta.get("machine", {}).get("cores", world)
    return f" on {cores} cores (oversubscribed)" if world > cores else ""


def _time(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"
