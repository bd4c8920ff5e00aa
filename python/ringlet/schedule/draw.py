"""Pictures of schedules: ranks from left to right, rounds from top to bottom.

A box is a chunk. Its colour says which chunk, its filling how many ranks' contributions are in it. If there is only one
chunk, it has a stripe for each rank's contribution instead. Arrows are transfers. If there are too many chunks, a box
is a whole rank. Colours and lines are visible on light and on dark backgrounds, and the same schedule always gives the
same bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from html import escape

from ringlet.schedule.cost import sent
from ringlet.schedule.data import Schedule, ScheduleError
from ringlet.schedule.frames import Content, Frames, frames_of

GREY = "#808a96"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
LEVELS = "·▁▂▃▄▅▆▇█"
CELL_WIDTH = 28
MOST_BOXES, MOST_BOXES_OF_CHUNKS = 5_000_000, 10_000  # of a picture; of one with a box for each chunk
_BAR, _ARROW = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion, which colour-blind readers can tell apart


def svg(schedule: Schedule) -> str:
    """The picture with every chunk, as an SVG document; ScheduleError if the schedule cannot run."""
    return _Picture(frames_of(schedule)).document()


def picture(schedule: Schedule) -> str:
    """The picture as an SVG document: with every chunk, or with a bar for each rank if there are too many."""
    return svg(schedule) if boxes(schedule) <= MOST_BOXES_OF_CHUNKS else _Overview(frames_of(schedule)).document()


def notebook_picture(schedule: Schedule) -> str | None:
    """The picture, for notebooks; None, so that they show the text, if it is too large or the schedule is wrong."""
    try:
        return picture(schedule) if boxes(schedule) <= MOST_BOXES else None
    except ScheduleError:
        return None


def boxes(schedule: Schedule) -> int:
    """The number of boxes in the picture with every chunk."""
    return (schedule.rounds + 1) * schedule.world * (schedule.world if schedule.parts == 1 else schedule.parts)


def caption(schedule: Schedule) -> tuple[str, str]:
    """A title and a line of numbers."""
    by_rank = sent(schedule)
    most = f"{'at most ' if len(set(by_rank)) > 1 else ''}{_fraction(max(by_rank))} sent per rank"
    rounds = f"{schedule.rounds} round{'s' * (schedule.rounds != 1)}"
    return schedule.name, rounds if schedule.collective == "barrier" else f"{rounds}, {most}"


def colours(count: int) -> list[str]:
    """`count` colours of equal lightness around the circle (OKLCH, lightness 0.7, chroma 0.14)."""
    return [_oklch(0.70, 0.14, 2 * math.pi * (i / max(count, 1) + 0.07)) for i in range(count)]


def document(width: float, height: float, lines: Iterable[str], title: str = "") -> str:
    """An SVG document of these lines."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="{FONT}" fill="{GREY}">'
    )
    return "\n".join([head, *([f"<title>{escape(title)}</title>"] if title else []), *lines, "</svg>", ""])


def label(x: float, y: float, what: str, size: float, style: str = "") -> str:
    """A text of an SVG document."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{style and " "}{style}>{escape(what)}</text>'


_EM, _BOLD_EM = 0.53, 0.58  # the width of an ordinary letter of FONT, in its size
_BOLD, _MIDDLE = 'font-weight="600"', 'text-anchor="middle"'


class _Picture:
    """Every chunk. A panel is a rank at a moment; arrows go between panels."""

    left, top = 74.0, 92.0
    gap = 26.0  # between columns
    pad = 7.0  # between a panel's edge and its boxes
    box_height = 26.0
    told = ""  # beside the numbers

    def __init__(self, scene: Frames):
        self.scene, self.schedule = scene, scene.schedule
        self.arrange()
        self.panel_height = self.box_height + 2 * self.pad
        self.title, self.subtitle = caption(scene.schedule)
        self.subtitle += self.told
        told = max(_BOLD_EM * 17 * len(self.title), _EM * 12 * len(self.subtitle))
        self.width = max(self.column(self.schedule.world) - self.gap, self.left + told) + 16
        self.height = self.row(len(scene.frames) - 1) + self.panel_height + 16

    def arrange(self) -> None:
        schedule, by_rank = self.schedule, self.scene.by_rank
        self.boxes = schedule.world if by_rank else schedule.parts
        self.box_width = min(16.0, max(4.0, 180.0 / self.boxes)) if self.boxes > 1 else 34.0
        self.space = 0.0 if by_rank else min(3.0, self.box_width / 4)
        # all_to_all's blocks to give stand apart from the blocks it gets.
        self.divide = 10.0 if schedule.collective == "all_to_all" else 0.0
        self.panel_width = self.boxes * (self.box_width + self.space) - self.space + self.divide + 2 * self.pad
        self.between = 50.0 + min(30.0, 2.0 * schedule.world)  # between rows
        origins = schedule.world if by_rank or schedule.collective == "all_to_all" else schedule.parts
        self.palette = colours(origins)

    def document(self) -> str:
        lines = [label(self.left, 24, self.title, 17, _BOLD), label(self.left, 43, self.subtitle, 12), *self.labels()]
        for moment in range(len(self.scene.frames)):
            lines += self.frame(moment)
        return document(self.width, self.height, [*lines, *self.arrows()], f"{self.title}: {self.subtitle}")

    def column(self, rank: int) -> float:
        return self.left + rank * (self.panel_width + self.gap)

    def row(self, moment: int) -> float:
        return self.top + moment * (self.panel_height + self.between)

    def box_left(self, rank: int, index: int) -> float:
        across = self.divide if index >= self.schedule.world else 0.0
        return self.column(rank) + self.pad + index * (self.box_width + self.space) + across

    def labels(self) -> list[str]:
        schedule, scene = self.schedule, self.scene
        lines = []
        for rank in range(schedule.world):
            middle = self.column(rank) + self.panel_width / 2
            lines.append(label(middle, self.top - 22, f"rank {rank}", 13, f"{_BOLD} {_MIDDLE}"))
            if schedule.hosts:
                lines.append(label(middle, self.top - 36, f"host {schedule.hosts[rank]}", 10, _MIDDLE))
            for index in range(self.boxes if self.boxes > 1 and self.box_width >= 8 else 0):
                x = self.box_left(rank, index) + self.box_width / 2
                lines.append(label(x, self.top - 6, str(index), 9, f'{_MIDDLE} opacity="0.8"'))
        for moment in range(len(scene.frames) - 1):
            middle = self.row(moment) + self.panel_height + self.between / 2
            found = {t.verb for t in scene.transfers if t.begins == moment}
            verbs = ", ".join(verb for verb in ("reduce", "recv", "copy") if verb in found)
            lines.append(label(self.left / 2 - 4, middle - 2, f"round {moment}", 12, f"{_BOLD} {_MIDDLE}"))
            lines.append(label(self.left / 2 - 4, middle + 12, verbs, 10, _MIDDLE))
        return lines

    def frame(self, moment: int) -> list[str]:
        """The panels of a moment, and their boxes: those of one style are one path."""
        top, lines = self.row(moment), []
        paths: dict[str, str] = defaultdict(str)
        for rank in range(self.schedule.world):
            if self.pad:
                size = f'width="{self.panel_width:g}" height="{self.panel_height:g}"'
                style = f'rx="7" fill="{GREY}" fill-opacity="0.09"'
                lines.append(f'<rect x="{self.column(rank):g}" y="{top:g}" {size} {style}/>')
            for index, (colour, share, opacity) in enumerate(self.cells(moment, rank)):
                x, width, bottom = self.box_left(rank, index), self.box_width, top + self.pad + self.box_height
                filled = round(share * self.box_height, 2)
                if filled:
                    paths[f'fill="{colour}" fill-opacity="{opacity:g}"'] += _rect(x, bottom - filled, width, filled)
                if share < 1:
                    style = f'fill="none" stroke="{colour}" stroke-opacity="{(0.6 if filled else 0.3) * opacity:g}"'
                    paths[style] += _rect(x, bottom - self.box_height, width, self.box_height)
        return lines + [f'<path d="{path}" {style}/>' for style, path in paths.items()]

    def cells(self, moment: int, rank: int) -> list[tuple[str, float, float]]:
        """(colour, filling, opacity) of each box of a rank."""
        scene, contents = self.scene, self.scene.frames[moment][rank]
        opacities = [0.3 if (moment, rank, index) in scene.spent else 1.0 for index in range(len(contents))]
        if scene.by_rank:
            held = contents[0][1] if contents[0] else 0
            ranks = range(self.schedule.world)
            return [(self.palette[r], 1.0, opacities[0]) if held >> r & 1 else (GREY, 1.0, 0.16) for r in ranks]
        return [
            (self.colour(rank, held), held[1].bit_count() / scene.whole, opacity) if held else (GREY, 0.0, 1.0)
            for held, opacity in zip(contents, opacities, strict=True)
        ]

    def colour(self, rank: int, content: Content) -> str:
        origin, ranks = content
        if self.scene.by_rank:
            return self.palette[rank]
        return self.palette[ranks.bit_length() - 1 if self.schedule.collective == "all_to_all" else origin]

    def arrows(self) -> list[str]:
        lines = []
        for t in self.scene.transfers:
            content = self.scene.frames[t.begins][t.source][t.source_box]
            colour = self.colour(t.source, content) if content else GREY
            x1, x2 = self.middle(t.source, t.source_box), self.middle(t.target, t.target_box)
            y1, y2 = self.row(t.begins) + self.panel_height + 1, self.row(t.ends) - 1
            bend = min((y2 - y1) * 0.55, 60)
            path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - 6 - bend:g} {x2:g} {y2 - 6:g}"
            head = f"M{x2 - 3.6:g} {y2 - 7:g}h7.2l-3.6 7z"
            lines.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.7" stroke-opacity="0.9"/>')
            lines.append(f'<path d="{head}" fill="{colour}" fill-opacity="0.9"/>')
        return lines

    def middle(self, rank: int, index: int) -> float:
        """The x from and to which arrows go."""
        if self.scene.by_rank:
            return self.column(rank) + self.panel_width / 2
        return self.box_left(rank, index) + self.box_width / 2


class _Overview(_Picture):
    """A bar for each rank. With every chunk, a ring of 64 ranks has half a million boxes."""

    left, top, gap, pad, box_height = 64.0, 84.0, 4.0, 0.0, 16.0
    told = "; a bar is a rank, filled by what it holds"

    def arrange(self) -> None:
        self.boxes, self.box_width, self.panel_width, self.between = 1, 10.0, 10.0, 26.0
        self.space = self.divide = 0.0

    def labels(self) -> list[str]:
        shown = range(0, self.schedule.world, max(1, self.schedule.world // 16))
        lines = [label(self.column(rank) + 5, self.top - 6, str(rank), 9, _MIDDLE) for rank in shown]
        for moment in range(len(self.scene.frames) - 1):
            y = self.row(moment) + self.box_height + self.between / 2 + 3
            lines.append(label(self.left - 8, y, f"round {moment}", 9, 'text-anchor="end"'))
        return lines

    def cells(self, moment: int, rank: int) -> list[tuple[str, float, float]]:
        contents = self.scene.frames[moment][rank]
        held = sum(content[1].bit_count() for content in contents if content)
        return [(_BAR, held / (self.scene.whole * len(contents)), 1.0)]

    def arrows(self) -> list[str]:
        """One line a pair of ranks, however many chunks go along it; one path a round."""
        paths: dict[int, str] = defaultdict(str)
        moves = {(t.begins, t.source, t.target, t.ends) for t in self.scene.transfers if t.verb != "copy"}
        for begins, source, target, ends in sorted(moves):
            x1, x2 = self.column(source) + 5, self.column(target) + 5
            paths[begins] += f"M{x1:g} {self.row(begins) + self.box_height + 1:g}L{x2:g} {self.row(ends) - 1:g}"
        style = f'fill="none" stroke="{_ARROW}" stroke-width="0.8" stroke-opacity="0.6"'
        return [f'<path d="{path}" {style}/>' for path in paths.values()]


def _rect(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"


def _fraction(value: Fraction) -> str:
    if value.denominator == 1:
        return "S" if value == 1 else f"{value} S"
    return f"{value.numerator}/{value.denominator} S"


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """OKLCH to an sRGB hex colour (Björn Ottosson, "A perceptual color space for image processing", 2020)."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3  # noqa: E741
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    channels = [min(1.0, max(0.0, v)) for v in linear]
    gamma = [12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in channels]
    return "#" + "".join(f"{round(255 * v):02x}" for v in gamma)


def text(schedule: Schedule) -> str:
    """The picture in characters: every rank's chunks after each round, ▁ to █ by contributions, and the sends."""
    scene = frames_of(schedule)
    rows = [("", [[f"rank {rank}"] for rank in range(schedule.world)])]
    if schedule.hosts:
        rows.insert(0, ("", [[f"host {host}"] for host in schedule.hosts]))
    for moment, frame in enumerate(scene.frames):
        rows.append(("start" if moment == 0 else "", [[_characters(scene, boxes)] for boxes in frame]))
        if moment + 1 < len(scene.frames):
            rows.append((f"round {moment}", [_sends(scene, moment, rank) for rank in range(schedule.world)]))
    width = max(len(line) for _, cells in rows for cell in cells for line in cell)
    lines = [": ".join(caption(schedule)), ""]
    for name, cells in rows:
        for line in range(max(len(cell) for cell in cells)):
            columns = [(cell[line] if line < len(cell) else "").ljust(width) for cell in cells]
            lines.append(f"{name if line == 0 else '':9}{'  '.join(columns)}".rstrip())
    return "\n".join(lines) + "\n"


def _characters(scene: Frames, boxes: tuple[Content | None, ...]) -> str:
    if scene.by_rank:
        ranks = boxes[0][1] if boxes[0] else 0
        return "".join("█" if ranks >> rank & 1 else "·" for rank in range(scene.schedule.world))
    return "".join(LEVELS[-(-8 * b[1].bit_count() // scene.whole)] if b else LEVELS[0] for b in boxes)


def _sends(scene: Frames, moment: int, rank: int) -> list[str]:
    """The sends of a rank at a moment, "chunk,chunk→rank" (only "→rank" if there is one chunk), in lines."""
    chunks: dict[int, list[str]] = {}
    for t in scene.transfers:
        if t.begins == moment and t.source == rank and t.verb != "copy":
            chunks.setdefault(t.target, []).append(str(t.source_box))
    single = scene.schedule.parts == 1
    lines = [""]
    for target, indices in chunks.items():
        word = f"{'' if single else ','.join(indices)}→{target}"
        if lines[-1] and len(lines[-1]) + 1 + len(word) > CELL_WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
