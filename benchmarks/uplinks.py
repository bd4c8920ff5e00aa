"""What crosses the uplinks of emulated hosts: counted, compared with the least that must, and with a plain stream."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.clusters import Cluster

from ringlet.bench import results
from ringlet.bench.cases import STREAM, Config, bus_factor
from ringlet.bench.jobs import BenchError
from ringlet.bench.ranks.case import Case
from ringlet.bench.report import Table, time_text
from ringlet.bench.results import Call, Meta, Row, by_call, config_of


def uplink_factor(collective: str, cluster: Cluster) -> float:
    """The least bytes that some host's uplink must carry one way, per byte of the buffer."""
    each = cluster.ranks_per_host if collective == "all_to_all" else 1
    return bus_factor(collective, cluster.hosts) * each


def busiest_uplink(before: list[Any], after: list[Any]) -> int | None:
    """The most bytes that crossed one host's uplink one way between two readings; None without hosts."""
    return max(
        (max(now.sent - then.sent, now.received - then.received) for then, now in zip(before, after, strict=True)),
        default=None,
    )


def refuse_what_went_around(cluster: Cluster, library: str, case: Case, uplink: int) -> None:
    """A library may detect that emulated hosts are one machine, and use its memory instead of the network."""
    least = case.bytes * (1.0 if library == STREAM else uplink_factor(case.collective, cluster))
    if cluster.hosts > 1 and uplink < least:
        raise BenchError(
            f"{library}: {uplink} bytes a call crossed the busiest uplink, but {case.collective} of {case.bytes} bytes "
            f"needs {least:.0f}: it does not use the network between the hosts"
        )


def relative_to(library: str, rows: Iterable[Row]) -> dict[tuple[Call, int, Config], float]:
    """(call, bytes, configuration) -> its p50 over that of `library`: medians over rounds of ratios within a round, of
    configurations without wrong elements. Empty if the library was not measured."""
    paired = results.pairs(results.without_wrong(rows), (library,))
    return {
        (call, size, config): statistics.median(own / base for own, base in found)
        for (call, config), sizes in paired.items() if config.library != library
        for size, found in sizes.items()
    }  # fmt: skip


def over_stream(rows: Iterable[Row]) -> dict[tuple[Call, int, Config], float]:
    """(call, bytes, configuration) -> its p50 over the plain stream's for as many bytes: medians over rounds of ratios
    within a round. If only the uplink takes time, this is the schedule's load on the busiest uplink, in buffers."""
    return relative_to(STREAM, rows)


def stream_times(rows: Iterable[Row]) -> dict[tuple[int, Config], float]:
    """`over_stream` by size and configuration. ValueError if the rows are not all of the same call."""
    found = over_stream(rows)
    if len({call for call, _, _ in found}) > 1:
        raise ValueError("rows of several calls: use over_stream")
    return {(size, config): ratio for (_, size, config), ratio in found.items()}


def tables(rows: list[Row], meta: Meta) -> list[Table]:
    """One table per call that moves data: the bytes on the busiest uplink, and times in those of a plain stream,
    against the bound. None without emulated hosts."""
    if not meta.get("cluster"):
        return []
    cluster = Cluster(**meta["cluster"])
    found, times = [], over_stream(rows)
    for call, here in by_call(rows):
        if cluster.hosts < 2 or call.world != cluster.world:  # of another cluster: its bound is another one
            continue
        least, lines = uplink_factor(call.collective, cluster), []
        for row in here:
            ratio, crossed = times.get((call, row["bytes"], config_of(row))), row["uplink_bytes"]
            if row["library"] == STREAM or row["bytes"] == 0 or crossed is None:
                continue
            lines.append(
                [
                    str(config_of(row)), str(row["bytes"]), time_text(row["time_us_p50"]), f"{crossed:.0f}",
                    f"{crossed / row['bytes']:.3f}", "" if ratio is None else f"{ratio:.3f}",
                    "" if ratio is None else f"{least / ratio:.1%}",
                ]
            )  # fmt: skip
        title = f"{call}: busiest uplink of {cluster}; the least that one must carry is {least:.3f} buffers"
        columns = ["library", "size (B)", "p50 (us)", "uplink (B)", "in buffers", "p50 in streams", "of the bound"]
        found += [Table(title, columns, lines)] if lines else []
    return found


def facts(meta: Meta) -> list[tuple[str, str]]:
    """The lines of a report on the hosts."""
    return [
        ("emulated cluster", f"{Cluster(**meta['cluster'])} (network namespaces of this machine, tbf)"),
        ("congestion control", str(meta.get("congestion_control"))),
    ]
