"""Draws time, bus bandwidth and the ratio to the fastest peer over size: a line for each library and way to use it."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .cases import LIMIT, PEERS, STREAM, BenchError, Config, format_bytes
from .results import Row, by_call, compare, config_of

FORMATS = (".svg", ".png", ".pdf")
# Okabe and Ito's palette, which colour-blind readers can tell apart; peers in greys and dashes, ringlet in colour.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C510A", "#5E3C99")
_MARKERS = "osD^vPX*"
_DASHES = (":", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), "-", (0, (3, 3)), (0, (1, 1)))
_LOOK: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "ringlet",
}  # fmt: skip

Style = dict[str, Any]


def require_matplotlib() -> None:
    """BenchError if it is not installed; does not import it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'ringlet[cli]'")


@contextlib.contextmanager
def _figure(path: Path, rows: int, columns: int) -> Iterator[Any]:
    """Axes by row, whose figure is written at the end, with one legend for all. The ending of `path` chooses the
    format."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_LOOK):
        size = (max(6.2 * columns, 9.2), 4.8 * rows + 0.8)
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        yield axes
        lines = [axis.get_legend_handles_labels() for axis in axes[:, 0]]
        named = {label: line for found in lines for line, label in zip(*found, strict=True)}
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
        # No date, no version: the same rows give the same bytes.
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        plt.close(figure)


def plot(rows: list[Row], path: Path) -> None:
    """A row of panels per call that moves data."""
    rows = [row for row in rows if row["bytes"] > 0]
    if not rows:
        raise BenchError("--plot: no measured call has a size: give a collective that moves data")
    calls = by_call(rows)
    styles = _styles(dict.fromkeys(config_of(row) for _, medians in calls for row in medians))
    fastest = compare(rows, {"best peer": [peer for peer in PEERS if peer not in (STREAM, LIMIT)]})
    with _figure(path, len(calls), 3 if fastest else 2) as axes:
        for (time, bandwidth, *ratio), (call, medians) in zip(axes, calls, strict=True):
            lines: dict[Config, list[Row]] = defaultdict(list)
            for row in medians:
                lines[config_of(row)].append(row)
            sizes = [row["bytes"] for row in medians]
            for config, points in lines.items():
                here = [row["bytes"] for row in points]
                time.plot(here, [row["time_us_p50"] for row in points], label=str(config), **styles[config])
                bandwidth.plot(here, [row["busbw_gbps"] for row in points], **styles[config])
            op = "" if call.op in ("sum", "none") else f", {call.op}"
            what = f"{call.collective}, {call.world} ranks, {call.dtype}{op}"
            _dress(time, f"{what}: time", "median time of a call (less is better)", sizes)
            _spread_ticks(time, _duration)
            _dress(bandwidth, "bus bandwidth", "GB/s (more is better)", sizes)
            bandwidth.set_ylim(bottom=0)
            for axis in ratio:
                for one in (one for one in fastest if one.call == call):
                    spread = [
                        [abs(end(one.rounds[size]) - one.ratios[size]) for size in one.ratios] for end in (min, max)
                    ]
                    axis.errorbar(one.ratios.keys(), one.ratios.values(), spread, elinewidth=0.9, **styles[one.config])
                axis.axhline(1.0, color="#444444", linewidth=1.0, zorder=1)
                _dress(axis, "ringlet against the fastest peer", "times as fast as the fastest peer", sizes)
                axis.set_xlabel("message size (line: median of the rounds; whisker: range)")
                _spread_ticks(axis, lambda ratio: f"{ratio:g}x")


def plot_times(times: Mapping[str, Mapping[int, float]], path: Path, title: str) -> None:
    """One panel: times[name] is a line, by size in bytes, in microseconds."""
    with _figure(path, 1, 1) as ((axis,),):
        for place, (name, by_size) in enumerate(times.items()):
            axis.plot(by_size.keys(), by_size.values(), label=name, **_coloured(place))
        _dress(axis, title, "time (less is better)", [size for one in times.values() for size in one])
        _spread_ticks(axis, _duration)


def _coloured(place: int) -> Style:
    return {"color": _COLOURS[place % len(_COLOURS)], "marker": _MARKERS[place % len(_MARKERS)], "markersize": 5}


def _styles(configs: Iterable[Config]) -> dict[Config, Style]:
    """A colour and a marker for each of ringlet's algorithms and vias; ordinary memory is hollow and dashed."""
    styles: dict[Config, Style] = {}
    ways: dict[tuple[str, str], int] = {}
    for config in configs:
        if config.library in PEERS:
            place = PEERS.index(config.library)
            grey = f"{0.1 + 0.6 * place / len(PEERS):.2f}"
            styles[config] = {"color": grey, "linestyle": _DASHES[place], "marker": _MARKERS[place], "markersize": 4}
        else:
            styles[config] = _coloured(ways.setdefault((config.algorithm, config.via), len(ways)))
            if config.memory != "registered":
                styles[config] |= {"linestyle": (0, (4, 1.5)), "markerfacecolor": "white"}
    return styles


def _dress(axis: Any, title: str, unit: str, sizes: Iterable[int]) -> None:
    sizes = sorted(set(sizes))
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
