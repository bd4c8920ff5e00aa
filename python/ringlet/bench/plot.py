"""Draws time, bus bandwidth and the ratio to the fastest peer over size: a line for each library and way to use it."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import LIMIT, PEERS, STREAM, Config, format_bytes
from .exceptions import BenchError
from .results import Comparison, Row, call_of, compare, config_of, median_rows

FORMATS = (".svg", ".png", ".pdf")
# Okabe and Ito's palette, which colour-blind readers can tell apart; peers in greys and dashes, ringlet in colour.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C510A", "#5E3C99")
_MARKERS = "osD^vPX*"
_PEERS = {
    "gloo": ("#111111", ":", "v"), "openmpi": ("#666666", "--", "s"), "mpich": ("#8A8A8A", "-.", "^"),
    "intelmpi": ("#3C3C3C", (0, (5, 1, 1, 1, 1, 1)), "D"), STREAM: ("#BBBBBB", "-", "x"),
    "nccl": ("#444444", "--", "P"), LIMIT: ("#B00000", (0, (1, 1)), ""),
}  # fmt: skip
_LOOK: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "ringlet",
}  # fmt: skip

Styles = dict[Config, dict[str, Any]]


def require_matplotlib() -> None:
    """BenchError if it is not installed; does not import it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'ringlet[cli]'")


@contextlib.contextmanager
def _figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which is written at the end. The ending of `path` chooses the format: .svg, .png, .pdf."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_LOOK):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        yield figure, axes
        # No date, no version: the same rows give the same bytes.
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        plt.close(figure)


def plot(rows: list[Row], path: Path) -> None:
    """A row of panels per call that moves data."""
    rows = [row for row in rows if row["bytes"] > 0]
    calls = list(dict.fromkeys(map(call_of, rows)))
    if not calls:
        raise BenchError("--plot: no measured call has a size: give a collective that moves data")
    styles = _styles([config_of(row) for row in median_rows(rows)])
    fastest = compare(rows, {"best peer": [peer for peer in PEERS if peer not in (STREAM, LIMIT)]})
    panels = 3 if fastest else 2
    with _figure(path, len(calls), panels, (6.2 * panels, 4.8 * len(calls) + 0.8)) as (figure, axes):
        for line, call in zip(axes, calls, strict=True):
            here = [row for row in rows if call_of(row) == call]
            _draw_measured(line, median_rows(here), styles)
            if fastest:
                _draw_ratios(line[2], [one for one in fastest if one.call == call], styles, here)
        found = {
            label: handle
            for axis in axes[:, 0]
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def plot_times(times: Mapping[str, Mapping[int, float]], path: Path, title: str) -> None:
    """One panel: times[name] is a line, by size in bytes, in microseconds."""
    with _figure(path, 1, 1, (9.2, 5.6)) as (figure, ((axis,),)):
        for place, (name, by_size) in enumerate(times.items()):
            look: dict[str, Any] = {
                "color": _COLOURS[place % len(_COLOURS)], "marker": _MARKERS[place % len(_MARKERS)], "markersize": 5,
                "linestyle": "-" if place < len(_COLOURS) else (0, (4, 1.5)),
            }  # fmt: skip
            axis.plot(list(by_size), list(by_size.values()), label=name, **look)
        _dress(axis, title, "time (less is better)", [{"bytes": size} for one in times.values() for size in one])
        _spread_ticks(axis, _duration)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)


def _draw_measured(axes: Sequence[Any], merged: list[Row], styles: Styles) -> None:
    """Time on logarithmic axes, bus bandwidth on a linear one."""
    time, bandwidth = axes[0], axes[1]
    lines: dict[Config, list[Row]] = defaultdict(list)
    for row in merged:
        lines[config_of(row)].append(row)
    for config, points in lines.items():
        sizes = [row["bytes"] for row in points]
        time.plot(sizes, [row["time_us_p50"] for row in points], label=str(config), **styles[config])
        bandwidth.plot(sizes, [row["busbw_gbps"] for row in points], **styles[config])
    call = call_of(merged[0])
    op = "" if call.op in ("sum", "none") else f", {call.op}"
    what = f"{call.collective}, {call.world} ranks, {call.dtype}{op}"
    _dress(time, f"{what}: time", "median time of a call (less is better)", merged)
    _spread_ticks(time, _duration)
    _dress(bandwidth, "bus bandwidth", "GB/s (more is better)", merged)
    bandwidth.set_ylim(bottom=0)


def _draw_ratios(axis: Any, ratios: list[Comparison], styles: Styles, rows: list[Row]) -> None:
    """Medians over rounds as lines, with a box and whiskers a size; lines stand beside each other, not on top."""
    for place, one in enumerate(ratios):
        shift = 1.025 ** (place - (len(ratios) - 1) / 2)
        sizes = [size * shift for size in one.ratios]
        found = [one.rounds[size] for size in one.ratios]
        style = styles[one.config]
        axis.plot(sizes, list(one.ratios.values()), **style)
        low, high = zip(*map(quartiles, found), strict=True)
        axis.vlines(sizes, low, high, color=style["color"], linewidth=4, alpha=0.35, zorder=2)
        axis.vlines(sizes, list(map(min, found)), list(map(max, found)), color=style["color"], linewidth=0.9, zorder=2)
    axis.axhline(1.0, color="#444444", linewidth=1.0, zorder=1)
    rounds = max((len(found) for one in ratios for found in one.rounds.values()), default=0)
    _dress(axis, "ringlet against the fastest peer", "times as fast as the fastest peer", rows)
    axis.set_xlabel(f"message size (line: median of {rounds} rounds; box: quartiles; whisker: range)")
    if ratios:
        _spread_ticks(axis, lambda ratio: f"{ratio:g}x")


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile. Half of the values lie between them."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _styles(configs: list[Config]) -> Styles:
    """A colour and a marker for each of ringlet's algorithms and vias; ordinary memory is hollow and thin."""
    styles: Styles = {}
    ways: dict[tuple[str, str], int] = {}
    for config in dict.fromkeys(configs):
        if config.library in _PEERS:
            colour, line, marker = _PEERS[config.library]
            styles[config] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "linewidth": 1.3}
            continue
        way = ways.setdefault((config.algorithm, config.via), len(ways))
        colour, registered = _COLOURS[way % len(_COLOURS)], config.memory == "registered"
        styles[config] = {
            "color": colour, "marker": _MARKERS[way % len(_MARKERS)], "markersize": 5,
            "linewidth": 2.0 if registered else 1.2, "linestyle": "-" if registered else (0, (4, 1.5)),
            "markerfacecolor": colour if registered else "white", "zorder": 3,
        }  # fmt: skip
    return styles


def _dress(axis: Any, title: str, unit: str, rows: list[Row]) -> None:
    sizes = sorted({row["bytes"] for row in rows})
    axis.set_xscale("log", base=2)
    shown = sizes[:: math.ceil(len(sizes) / 7)]
    axis.set_xticks(shown, [format_bytes(size) for size in shown], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("message size")
    axis.set_ylabel(unit)
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(True, which="major", alpha=0.25)


def _spread_ticks(axis: Any, tell: Callable[[float], str]) -> None:
    """A logarithmic axis with a few labels, however short it is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    few, some, many = (1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0)
    steps = few if high / low >= 200 else some if high / low >= 8 else many
    axis.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tell(value)))


def _duration(us: float) -> str:
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:g} {name}"
    return f"{us:g} µs"
