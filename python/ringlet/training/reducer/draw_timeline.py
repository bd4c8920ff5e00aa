"""Draws one reduced backward: when gradients arrived, when buckets were full, and when they were on the wire."""

from __future__ import annotations

import os
from typing import Any

from ringlet.errors import InvalidUsage, ResourceError

_IDLE = "#bbbbbb"
LABELLED = 24  # buckets; more labels would hide each other
TRACKS = ("communication", "buckets", "backward")  # from below
ROWS = 6  # of communication: several buckets may be under way at once


def draw(stats: dict[str, Any], path: str | os.PathLike[str], rank: int) -> None:
    """Writes the picture of `GradientReducer.stats()` to `path`. Raises InvalidUsage if there is nothing to draw."""
    if not stats["buckets"]:
        raise InvalidUsage("plot_timeline: no backward has been reduced yet")
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidUsage("plot_timeline needs matplotlib: pip install 'ringlet[cli]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    look: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "ringlet"}
    with plt.rc_context(look):
        figure, axes = plt.subplots(figsize=(11, 3.2), layout="constrained")
        colour_of = {}
        for place, (bucket, colour) in enumerate(zip(stats["buckets"], _colours(len(stats["buckets"])), strict=True)):
            colour_of.update(dict.fromkeys(bucket["parameters"], colour))
            _draw_bucket(axes, bucket, place, colour)
        _draw_backward(axes, stats, colour_of)
        _draw_ends(axes, stats)
        axes.set_yticks(range(len(TRACKS)), TRACKS)
        axes.set_ylim(-0.6, len(TRACKS) - 0.1)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds since the start of backward")
        axes.set_title(_title(stats, rank), fontsize=10, loc="left")
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:  # an ending that names no format
            raise InvalidUsage(f"plot_timeline: {error}") from error
        except OSError as error:
            raise ResourceError(f"plot_timeline: {error}") from error
        finally:
            plt.close(figure)


def _colours(count: int) -> list[Any]:
    """One for each bucket: viridis, which colour-blind readers see as an order, without its end, too light on white."""
    import matplotlib

    return [matplotlib.colormaps["viridis"](0.92 * place / max(1, count - 1)) for place in range(count)]


def _draw_backward(axes: Any, stats: dict[str, Any], colour_of: dict[str, Any]) -> None:
    """One bar for each gradient, from the arrival of the previous one, in its bucket's colour; grey after the last."""
    track, begin = TRACKS.index("backward"), 0.0
    for name, at in zip(stats["ready_order"], stats["ready_s"], strict=True):
        bar = {"color": colour_of[name], "edgecolor": "white", "linewidth": 0.3}
        axes.barh(track, 1e3 * (at - begin), left=1e3 * begin, height=0.5, **bar)
        begin = at
    axes.barh(track, 1e3 * (stats["backward_s"] - begin), left=1e3 * begin, height=0.5, color=_IDLE)


def _draw_bucket(axes: Any, bucket: dict[str, Any], place: int, colour: Any) -> None:
    """A bar while the bucket waits, a mark when it is handed to the backend, and a bar until it is reduced."""
    ready, launched, done = (1e3 * bucket[key] for key in ("ready_s", "launched_s", "done_s"))
    track = TRACKS.index("buckets")
    axes.barh(track, launched - ready, left=ready, height=0.2, color=colour, alpha=0.4)
    axes.plot([launched], [track], marker="o", color=colour, markersize=5)
    if place < LABELLED:
        offset = (0, 6 if place % 2 else -12)
        text = f"{place}: {_bytes(bucket['bytes'])}"
        axes.annotate(text, (launched, track), offset, textcoords="offset points", fontsize=7, ha="center")
    height = 0.5 / ROWS
    low = TRACKS.index("communication") - 0.25 + height * (place % ROWS)
    axes.barh(low + height / 2, done - launched, left=launched, height=height, color=colour)


def _draw_ends(axes: Any, stats: dict[str, Any]) -> None:
    ended = 1e3 * stats["backward_s"]
    ready = max(ended, ended + 1e3 * stats["exposed_s"])
    axes.axvspan(ended, ready, color=_IDLE, alpha=0.35, linewidth=0)
    axes.axvline(ended, color="black", linewidth=0.8, linestyle="--")
    axes.axvline(ready, color="black", linewidth=0.8)
    axes.text(ready, -0.55, " exposed", fontsize=8, va="bottom")


def _title(stats: dict[str, Any], rank: int) -> str:
    milliseconds = {key: 1e3 * stats[f"{key}_s"] for key in ("backward", "communication", "exposed")}
    told = ", ".join(f"{key} {value:.2f} ms" for key, value in milliseconds.items())
    return f"rank {rank}, backward {stats['backwards']}: {told}; {len(stats['buckets'])} buckets"


def _bytes(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / (1 << 10):.1f} KiB"
