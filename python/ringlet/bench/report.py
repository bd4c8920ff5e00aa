"""Results for people: a table in nccl-tests' columns, and the summary of ratios.

Times are in microseconds and bandwidths in GB/s (10^9), medians over rounds of the median and the 99th percentile of
a measurement.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from .cases import MPI_PEERS, Config, format_bytes
from .results import Call, Comparison, Meta, Row, by_call, compare, config_of


@dataclass(frozen=True)
class Table:
    """Title, column names and rows of text; the first `left` columns are words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: int = 1


def measurements(rows: list[Row], meta: Meta) -> list[Table]:
    """One table per call: a line per size and configuration."""
    tables = []
    columns = ["library", "transport", "size (B)", "count", "type", "redop", "min (us)", "p50 (us)", "p99 (us)"]
    columns += ["algbw", "busbw", "#wrong"]
    for call, here in by_call(rows):
        lines = []
        for row in here:
            line = [str(config_of(row)), *(str(row[key]) for key in ("transport", "bytes", "count", "dtype", "op"))]
            line += [time_text(row[f"time_us_{what}"]) for what in ("min", "p50", "p99")]
            line += [f"{row[rate]:.3g}" for rate in ("algbw_gbps", "busbw_gbps")]
            lines.append([*line, "n/a" if row["wrong"] is None else str(row["wrong"])])
        title = f"{call}, {_ranks(call.world, meta)}, medians of {here[0]['round']} rounds"
        tables.append(Table(title, columns, lines, left=2))
    return tables


def summary(rows: list[Row], meta: Meta) -> list[Table]:
    """One table per world and set of rivals: how many times faster each configuration is, size by size. A configuration
    with wrong elements has no ratio."""
    tables = []
    groups: dict[tuple[int, str], list[Comparison]] = defaultdict(list)
    for comparison in compare(rows):
        groups[comparison.call.world, comparison.rivals].append(comparison)
    for (world, rivals), comparisons in sorted(groups.items()):
        columns = [one.ratios for one in comparisons]
        sizes = sorted({size for ratios in columns for size in ratios})
        lines = [[format_bytes(size), *(_ratio(ratios.get(size)) for ratios in columns)] for size in sizes]
        means = (_ratio(statistics.geometric_mean(ratios.values())) for ratios in columns)
        lines += [["geometric mean", *means], *_overall(comparisons)]
        present = sorted({row["library"] for row in rows if row["world"] == world and row["library"] in MPI_PEERS})
        among = f" ({', '.join(present)})" if rivals == "best MPI" else ""
        title = f"time of {rivals}{among} / time of ringlet, {_ranks(world, meta)}"
        title += ": median over rounds of ratios within a round"
        tables.append(Table(title, ["size", *_headers(comparisons)], lines))
    return tables


def _headers(comparisons: list[Comparison]) -> list[str]:
    """What distinguishes the columns: configurations, calls, or both."""
    calls = {one.call for one in comparisons}
    configs = [str(one.config).removeprefix("ringlet ") for one in comparisons]
    if len(calls) == 1:
        return configs
    several = len(calls) > len({call.collective for call in calls})

    def told(call: Call) -> str:
        return str(call) if several else call.collective

    same = len(set(configs)) == 1
    return [told(one.call) + ("" if same else f" {config}") for one, config in zip(comparisons, configs, strict=True)]


def _overall(comparisons: list[Comparison]) -> list[list[str]]:
    """A line with each configuration's mean over all collectives and sizes, in its first column; none for one."""
    if len({one.call.collective for one in comparisons}) == 1:
        return []
    ratios: dict[Config, list[float]] = defaultdict(list)
    for one in comparisons:
        ratios[one.config] += one.ratios.values()
    means = {config: _ratio(statistics.geometric_mean(found)) for config, found in ratios.items()}
    return [["of all collectives"] + [means.pop(one.config, "") for one in comparisons]]


def _ranks(world: int, meta: Meta) -> str:
    cores = meta.get("machine", {}).get("cores", world)
    return f"{world} ranks" + (f" on {cores} cores (oversubscribed)" if world > cores else "")


def time_text(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"
