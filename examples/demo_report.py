"""The demo's tables and picture."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringlet
from ringlet.bench.results import machine

SMOOTH_STEPS = 8
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = {"ddp_gloo": "#CC79A7", "ddp": "#777777", "reducer": "#009E73", "ring": "#0072B2", "butterfly": "#D55E00"}
INK, PALE = "#222222", "#d9d9d9"


@dataclass(frozen=True)
class Findings:
    """What the demo measured: each mode's row (demo.summary), the modes' titles, and the rows of `ringlet bench`."""

    modes: dict[str, dict]
    titles: dict[str, str]
    sizes: list[dict]
    ranks: int
    alone: str  # the mode without communication

    @property
    def alone_ms(self) -> float:
        return self.modes[self.alone]["step_ms"]

    def headline(self) -> str:
        """What a user of DDP on gloo gains."""
        costs = [
            f"{self.modes[mode]['overhead_ms']:.1f} ms with {self.titles[mode]}" for mode in ("ddp_gloo", "reducer")
        ]
        return f"Communication costs {costs[0]} a step, {costs[1]}"

    def setting(self) -> str:
        """Ranks, processor, cores and versions, in one line."""
        import torch

        found = machine()
        where = f"{self.ranks} local ranks · {found['processor']}, {found['cores']} cores"
        return f"{where} · ringlet {ringlet.__version__} · torch {torch.__version__}"


def print_modes(modes: dict[str, dict], titles: dict[str, str], alone: str) -> None:
    last = f"mean of last {SMOOTH_STEPS}"
    print(f"\n{'mode':<30}{'first loss':>11}{last:>16}{'step ms':>10}{'overhead ms':>13}{'exposed ms':>12}")
    for mode in titles:
        row = modes[mode]
        losses = f"{row['losses'][0]:>11.4f}{statistics.fmean(row['losses'][-SMOOTH_STEPS:]):>16.4f}"
        times = f"{row['step_ms']:>10.2f}{row['overhead_ms']:>13.2f}{row['exposed_ms']:>12.3f}"
        print(f"{titles[mode]:<30}{losses}{times}")
    print(f"{'no communication':<30}{'':>27}{modes[alone]['step_ms']:>10.2f}{0:>13.2f}")
    print("overhead: the step less the step without communication; exposed: from the end of backward to the averages")


def medians(rows: list[dict]) -> dict[str, dict[int, float]]:
    """Microseconds by column ("ring", "butterfly", "gloo") and bytes: the median over rounds of each round's median."""
    times: dict[str, dict[int, list[float]]] = {"ring": {}, "butterfly": {}, "gloo": {}}
    for row in rows:
        column = row["algorithm"] if row["library"] == "ringlet" else row["library"]
        times[column].setdefault(row["bytes"], []).append(row["time_us_p50"])
    return {column: {size: statistics.median(v) for size, v in by.items()} for column, by in times.items()}


def size_of(count: int) -> str:
    """4 B, 16 KiB, 64 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"


def time_of(us: float) -> str:
    """0.52 µs, 14.3 µs, 2.31 ms: three digits."""
    value, unit = (us, "µs") if us < 1e3 else (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def size_rows(rows: list[dict]) -> list[list[str]]:
    """A header and a line for each size, as text."""
    columns = medians(rows)
    table = [["size", *columns, "gloo / best"]]
    for size in sorted({row["bytes"] for row in rows}):
        own = min(columns[column][size] for column in columns if column != "gloo")
        times = [time_of(columns[column][size]) for column in columns]
        table.append([size_of(size), *times, f"{columns['gloo'][size] / own:,.1f}x"])
    return table


def print_sizes(rows: list[dict]) -> None:
    print("all-reduce of float32: ringlet on registered memory through its API, gloo through torch.distributed")
    for line in size_rows(rows):
        print("".join(f"{cell:>14}" for cell in line))


def draw_picture(path: Path, found: Findings) -> None:
    """One picture: each mode's overhead, the loss curve and the modes' differences, all-reduce times over sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    look: dict[str, Any] = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
        "axes.titlesize": 11, "axes.titleweight": "bold", "text.color": INK,
    }  # fmt: skip
    with pyplot.rc_context(look):
        lines = 2 if found.sizes else 1
        figure = pyplot.figure(figsize=(13, 4.4 * lines + 0.9), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
        figure.suptitle(found.headline(), x=0.01, ha="left", fontsize=15, fontweight="bold")
        grid = figure.add_gridspec(lines + 1, 2, height_ratios=[0.02] + [1] * lines)
        subtitle = figure.add_subplot(grid[0, :])
        subtitle.axis("off")
        subtitle.text(0, 0.5, found.setting(), color="#666666", va="center")
        draw_overhead(figure.add_subplot(grid[1, 0]), found)
        losses = grid[1, 1].subgridspec(2, 1, height_ratios=[1.5, 1])
        draw_losses(figure.add_subplot(losses[0]), figure.add_subplot(losses[1]), found)
        if found.sizes:
            draw_sizes(figure.add_subplot(grid[2, 0]), found.sizes)
            draw_table(figure.add_subplot(grid[2, 1]), found.sizes)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def draw_overhead(axes, found: Findings) -> None:
    """What a step costs more than one without communication; the exposed part in full colour."""
    for place, (mode, title) in enumerate(found.titles.items()):
        row = found.modes[mode]
        overhead = row["overhead_ms"]
        axes.barh(place, overhead, color=COLORS[mode], alpha=0.35, height=0.62)
        axes.barh(place, min(row["exposed_ms"], max(overhead, 0)), color=COLORS[mode], height=0.62)
        share = 100 * overhead / found.alone_ms
        axes.text(max(overhead, 0), place, f"  {overhead:+.2f} ms  ({share:+.1f} %)", va="center")
        axes.text(0, place - 0.34, title, va="bottom", fontsize=9, fontweight="bold", color=COLORS[mode])
    axes.set(
        title=f"Overhead: ms a step, over a step of {found.alone_ms:.1f} ms without communication",
        xlabel="ms, median of paired differences; dark: exposed after backward",
    )
    axes.set_yticks([])
    widest = max(found.modes[mode]["overhead_ms"] for mode in found.titles)
    axes.set_xlim(min(0.0, min(found.modes[mode]["overhead_ms"] for mode in found.titles)) * 1.1, 1.45 * widest + 1e-3)
    axes.set_ylim(len(found.titles) - 0.5, -0.75)


def draw_losses(curve, differences, found: Findings) -> None:
    """One curve, that of the first mode, and below it what each other mode's losses differ from it."""
    first, *others = found.titles
    losses = found.modes[first]["losses"]
    smooth = [statistics.fmean(losses[max(0, i + 1 - SMOOTH_STEPS) : i + 1]) for i in range(len(losses))]
    curve.plot(smooth, color=COLORS[first], linewidth=2)
    curve.set(title=f"Loss: {found.titles[first]}", ylabel="nats per character")
    curve.tick_params(labelbottom=False)
    apart = {mode: [1e6 * (a - b) for a, b in zip(found.modes[mode]["losses"], losses, strict=True)] for mode in others}
    for mode, values in apart.items():
        differences.plot(values, color=COLORS[mode], linewidth=1.2, label=found.titles[mode])
    differences.set(xlabel="step", ylabel="millionths of a nat")
    differences.sharex(curve)
    reach = max(abs(value) for values in apart.values() for value in values)
    if reach == 0:
        differences.set_title("The four other modes: the same bits at every step", fontsize=10)
        differences.set_ylim(-1, 1)
        return
    differences.set_title("The other modes less that curve", fontsize=10)
    differences.set_ylim(-1.1 * reach, 2.0 * reach)  # the legend stands above the lines
    differences.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def draw_sizes(axes, rows: list[dict]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for column, by_size in medians(rows).items():
        color = COLORS.get(column, COLORS["ddp_gloo"])
        sizes = sorted(by_size)
        times = [by_size[size] for size in sizes]
        axes.plot(sizes, times, marker="o", markersize=4, linewidth=2, color=color, label=column)
    axes.set(title="All-reduce of float32: time by message size", xscale="log", yscale="log")
    sizes = sorted({row["bytes"] for row in rows})
    axes.set_xticks(sizes, [size_of(size) for size in sizes], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")


def draw_table(axes, rows: list[dict]) -> None:
    """The same as numbers, set as text: sizes to the left, numbers to the right, a line under the header."""
    header, *lines = size_rows(rows)
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(len(lines) + 0.6, -0.9), title="Medians, and how many times faster than gloo")
    right = [0.14, 0.36, 0.58, 0.78, 1.0]
    for row, cells in enumerate([header, *lines]):
        for place, (x, cell) in enumerate(zip(right, cells, strict=True)):
            weight = "bold" if row == 0 or place == len(cells) - 1 else "normal"
            color = COLORS.get(header[place], COLORS["ddp_gloo"] if header[place] == "gloo" else INK)
            axes.text(x, row - 0.3, cell, ha="right", va="center", weight=weight, color=color if row == 0 else INK)
    axes.axhline(0.25, color=INK, linewidth=0.8)
    for row in range(1, len(lines)):
        axes.axhline(row + 0.25, color=PALE, linewidth=0.6)
