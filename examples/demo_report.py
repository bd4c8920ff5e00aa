"""The demo's tables and picture."""

from __future__ import annotations

import statistics
from pathlib import Path

SMOOTH_STEPS = 8
COLORS = {"ring": "#1f6f8b", "butterfly": "#e07a1f", "naive": "#7a7a7a", "ddp": "#6a4c93", "ddp_gloo": "#b23a48"}


def print_modes(modes: dict[str, dict], titles: dict[str, str]) -> None:
    last = f"mean of last {SMOOTH_STEPS}"
    print(f"\n{'mode':<30}{'first loss':>11}{last:>16}{'step ms':>10}{'exposed ms':>12}")
    for mode, row in modes.items():
        losses = f"{row['losses'][0]:>11.4f}{statistics.fmean(row['losses'][-SMOOTH_STEPS:]):>16.4f}"
        print(f"{titles[mode]:<30}{losses}{row['step_ms']:>10.2f}{row['exposed_ms']:>12.3f}")


def medians(rows: list[dict]) -> dict[str, dict[int, float]]:
    """Microseconds by column ("ring", "butterfly", "gloo") and bytes: the median over rounds of each round's median."""
    times: dict[str, dict[int, list[float]]] = {"ring": {}, "butterfly": {}, "gloo": {}}
    for row in rows:
        column = row["algorithm"] if row["library"] == "ringlet" else row["library"]
        times[column].setdefault(row["bytes"], []).append(row["time_us_p50"])
    return {column: {size: statistics.median(v) for size, v in by.items()} for column, by in times.items()}


def size_rows(rows: list[dict]) -> list[list[str]]:
    """A header and a line for each size, as text."""
    columns = medians(rows)
    table = [["bytes", *(f"{column} us" for column in columns), "gloo / best"]]
    for size in sorted({row["bytes"] for row in rows}):
        own = min(columns[column][size] for column in columns if column != "gloo")
        times = [f"{columns[column][size]:,.2f}" for column in columns]
        table.append([f"{size:,}", *times, f"{columns['gloo'][size] / own:,.1f}x"])
    return table


def print_sizes(rows: list[dict]) -> None:
    print("all-reduce of float32: ringlet on registered memory through its API, gloo through torch.distributed")
    for line in size_rows(rows):
        print("".join(f"{cell:>14}" for cell in line))


def draw_picture(path: Path, modes: dict[str, dict], titles: dict[str, str], rows: list[dict]) -> None:
    """Loss curves, step times, all-reduce times over sizes and the table of them, in one picture at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = 2 if rows else 1
    figure, axes = pyplot.subplots(lines, 2, figsize=(13, 4.3 * lines), layout="constrained", squeeze=False)
    draw_losses(axes[0][0], modes, titles)
    draw_times(axes[0][1], modes, titles)
    if rows:
        draw_sizes(axes[1][0], rows)
        draw_table(axes[1][1], rows)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_losses(axes, modes: dict[str, dict], titles: dict[str, str]) -> None:
    # the curves lie on each other: wide lines below, narrow ones above, so that all show
    for place, (mode, row) in enumerate(modes.items()):
        width = 2.2 * (len(modes) - place)
        losses = row["losses"]
        smooth = [statistics.fmean(losses[max(0, i + 1 - SMOOTH_STEPS) : i + 1]) for i in range(len(losses))]
        axes.plot(smooth, color=COLORS[mode], linewidth=width, label=titles[mode])
    axes.set(
        title="Loss: the same curve five times",
        xlabel=f"step (mean of {SMOOTH_STEPS} steps)",
        ylabel="nats per character",
    )
    axes.legend(frameon=False)


def draw_times(axes, modes: dict[str, dict], titles: dict[str, str]) -> None:
    names = [titles[mode] for mode in modes]
    exposed = [row["exposed_ms"] for row in modes.values()]
    rest = [row["step_ms"] - row["exposed_ms"] for row in modes.values()]
    axes.barh(names, rest, color="#d9d9d9")
    axes.barh(names, exposed, left=rest, color=[COLORS[mode] for mode in modes])
    for place, (one, total) in enumerate(zip(exposed, rest, strict=True)):
        axes.text(total + one, place, f" {total + one:.1f}, exposed {one:.2f}", va="center", fontsize=8)
    axes.set(title="Step time; coloured: exposed communication", xlabel="ms, median")
    axes.set_xlim(0, 1.35 * max(map(sum, zip(rest, exposed, strict=True))))
    axes.invert_yaxis()


def draw_sizes(axes, rows: list[dict]) -> None:
    for column, by_size in medians(rows).items():
        color = COLORS.get(column, COLORS["ddp_gloo"])
        axes.plot(sorted(by_size), [by_size[size] for size in sorted(by_size)], marker="o", label=column, color=color)
    axes.set(title="All-reduce over message size", xlabel="bytes", ylabel="us", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_table(axes, rows: list[dict]) -> None:
    header, *lines = size_rows(rows)
    axes.axis("off")
    table = axes.table(cellText=lines, colLabels=header, loc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.5)
