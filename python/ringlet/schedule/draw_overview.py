"""A picture of a schedule of many ranks: how full each rank is after each round, and which rank sends to which.

`draw` shows every chunk, which takes rounds x ranks x chunks boxes: 92 MB for a ring of 64. Here a rank is one bar, and
each round is one path.
"""

from __future__ import annotations

from ringlet.schedule.data import Schedule, ScheduleError
from ringlet.schedule.draw import FONT, GREY, caption, svg
from ringlet.schedule.frames import Frames, Transfer, frames_of

_BAR, _ARROW = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion, which colour-blind readers can tell apart
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP, _BETWEEN = 64, 84, 10, 16, 4, 26

MOST_BOXES, MOST_BOXES_OF_CHUNKS = 5_000_000, 10_000  # of a picture; of one with a box for each chunk, about 2 MB


def picture(schedule: Schedule) -> str:
    """The picture as an SVG document: with every chunk, or the overview if there are too many."""
    return svg(schedule) if boxes(schedule) <= MOST_BOXES_OF_CHUNKS else overview(schedule)


def notebook_picture(schedule: Schedule) -> str | None:
    """The picture, for notebooks; None, so that they show the text, if it is too large or the schedule is wrong."""
    try:
        return picture(schedule) if boxes(schedule) <= MOST_BOXES else None
    except ScheduleError:
        return None


def boxes(schedule: Schedule) -> int:
    """The number of boxes in the picture with every chunk."""
    return (schedule.rounds + 1) * schedule.world * (schedule.world if schedule.parts == 1 else schedule.parts)


def overview(schedule: Schedule) -> str:
    """The picture as an SVG document; ScheduleError if the schedule cannot run."""
    scene = frames_of(schedule)
    title, subtitle = caption(schedule)
    width = _LEFT + schedule.world * (_WIDTH + _GAP) + 16
    height = _row(len(scene.frames) - 1) + _HEIGHT + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{FONT}" fill="{GREY}">',
        f"<title>{title}: {subtitle}</title>",
        f'<text x="{_LEFT}" y="24" font-size="17" font-weight="600">{title}</text>',
        f'<text x="{_LEFT}" y="43" font-size="12">{subtitle}; a bar is a rank, filled by what it holds</text>',
    ]
    for rank in range(0, schedule.world, max(1, schedule.world // 16)):
        middle = _column(rank) + _WIDTH / 2
        lines.append(f'<text x="{middle:g}" y="{_TOP - 6}" text-anchor="middle" font-size="9">{rank}</text>')
    for moment in range(len(scene.frames)):
        lines += _bars(scene, moment)
    for moment in range(len(scene.frames) - 1):
        lines.append(f'<text x="{_LEFT - 8}" y="{_row(moment) + _HEIGHT + _BETWEEN / 2 + 3:g}" text-anchor="end" '
                     f'font-size="9">round {moment}</text>')  # fmt: skip
        lines.append(_lines([t for t in scene.transfers if t.begins == moment and t.verb != "copy"]))
    return "\n".join([*lines, "</svg>", ""])


def _column(rank: int) -> int:
    return _LEFT + rank * (_WIDTH + _GAP)


def _row(moment: int) -> int:
    return _TOP + moment * (_HEIGHT + _BETWEEN)


def _bars(scene: Frames, moment: int) -> list[str]:
    y = _row(moment)
    empty, full = [], []
    for rank, held in enumerate(scene.frames[moment]):
        share = sum(content[1].bit_count() for content in held if content) / (scene.whole * len(held))
        height = round(share * _HEIGHT, 1)
        empty.append(f"M{_column(rank)} {y}h{_WIDTH}v{_HEIGHT}h-{_WIDTH}z")
        full.append(f"M{_column(rank)} {y + _HEIGHT}h{_WIDTH}v-{height:g}h-{_WIDTH}z")
    return [
        f'<path d="{"".join(empty)}" fill="{GREY}" fill-opacity="0.14"/>',
        f'<path d="{"".join(full)}" fill="{_BAR}"/>',
    ]


def _lines(transfers: list[Transfer]) -> str:
    """One line a pair of ranks, however many chunks go along it."""
    pairs = sorted({(t.source, t.target, t.begins, t.ends) for t in transfers})
    half = _WIDTH / 2
    path = "".join(
        f"M{_column(source) + half:g} {_row(begins) + _HEIGHT + 1}L{_column(target) + half:g} {_row(ends) - 1}"
        for source, target, begins, ends in pairs
    )
    return f'<path d="{path}" fill="none" stroke="{_ARROW}" stroke-width="0.8" stroke-opacity="0.6"/>'
