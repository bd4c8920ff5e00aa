"""Draws time and bus bandwidth over size, one line per library and way of using it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import Config, format_bytes
from .errors import BenchError
from .results import Row, config_of, median_rows

# Okabe and Ito's palette, which colour-blind readers can tell apart; peers in greys and dashes, ringlet in colour.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C510A", "#5E3C99")
_PEERS = {
    "gloo": ("#333333", ":", "v"), "openmpi": ("#777777", "--", "s"), "mpich": ("#999999", "-.", "^"),
    "intelmpi": ("#555555", (0, (5, 1, 1, 1, 1, 1)), "D"), "stream": ("#BBBBBB", "-", "x"),
}  # fmt: skip


def plot(rows: list[Row], path: Path) -> None:
    """A row of two panels per collective that moves data, and world. The ending of `path` chooses the format: .svg,
    .png, .pdf."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: pip install 'ringlet[cli]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    merged = [row for row in median_rows(rows) if row["bytes"] > 0]
    kinds = list(dict.fromkeys((row["collective"], row["world"]) for row in rows if row["bytes"] > 0))
    styles = _styles([config_of(row) for row in merged])
    look: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "ringlet",
    }
    size = (13, 5.2 * len(kinds))
    with plt.rc_context(look):
        figure, axes = plt.subplots(len(kinds), 2, figsize=size, squeeze=False, layout="constrained")
        for (left, right), (collective, world) in zip(axes, kinds, strict=True):
            lines: dict[Config, list[Row]] = defaultdict(list)
            for row in (row for row in merged if (row["collective"], row["world"]) == (collective, world)):
                lines[config_of(row)].append(row)
            for config, points in lines.items():
                sizes = [row["bytes"] for row in points]
                left.plot(sizes, [row["time_us_p50"] for row in points], label=str(config), **styles[config])
                right.plot(sizes, [row["busbw_gbps"] for row in points], label=str(config), **styles[config])
            what = f"{collective}, {world} ranks, {merged[0]['dtype']}"
            _dress(left, f"{what}: time (median; less is better)", _duration, merged)
            _dress(right, f"{what}: bus bandwidth (more is better)", lambda gbps: f"{gbps:g} GB/s", merged)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _styles(configs: list[Config]) -> dict[Config, dict[str, object]]:
    """A colour for each of ringlet's algorithms and vias; ordinary memory is hollow and thin."""
    styles: dict[Config, dict[str, object]] = {}
    colours: dict[tuple[str, str], str] = {}
    for config in dict.fromkeys(configs):
        if config.library in _PEERS:
            colour, line, marker = _PEERS[config.library]
            styles[config] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "linewidth": 1.3}
            continue
        colour = colours.setdefault((config.algorithm, config.via), _COLOURS[len(colours) % len(_COLOURS)])
        registered = config.memory == "registered"
        styles[config] = {
            "color": colour, "marker": "o", "markersize": 5, "linewidth": 2.2 if registered else 1.3,
            "markerfacecolor": colour if registered else "white", "zorder": 3,
        }  # fmt: skip
    return styles


def _dress(axis: Any, title: str, tell: Callable[[float], str], rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    sizes = sorted({row["bytes"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    shown = sizes[:: math.ceil(len(sizes) / 8)]
    axis.set_xticks(shown, [format_bytes(size) for size in shown], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("message size")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,), numticks=20))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tell(value)))
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(True, which="major", alpha=0.25)


def _duration(us: float) -> str:
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:g} {name}"
    return f"{us:g} µs"
