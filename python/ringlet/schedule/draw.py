"""Pictures of schedules: ranks from left to right, rounds from top to bottom.

A box is a chunk. Its colour says which chunk, its filling how many ranks' contributions are in it. If there is only one
chunk, it has a stripe for each rank's contribution instead. Arrows are transfers. Colours and lines are visible on
light and on dark backgrounds, and the same schedule always gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ringlet.schedule.cost import counts
from ringlet.schedule.data import Schedule
from ringlet.schedule.frames import Content, Frames, Transfer, frames_of
from ringlet.schedule.relative_program import program_of_any_rank, relative

GREY = "#808a96"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
LEVELS = "·▁▂▃▄▅▆▇█"
CELL_WIDTH = 28


def svg(schedule: Schedule, relative_program: bool = False) -> str:
    """The picture as an SVG document; ScheduleError if the schedule cannot run.

    `relative_program`: ranks and chunks are counted from r, and others' arrows are pale; ValueError if ranks differ.
    """
    if relative_program:
        program_of_any_rank(schedule)
    return _document(_Layout(frames_of(schedule)), relative_program)


def side_by_side(schedules: Sequence[Schedule]) -> str:
    """One SVG document with the schedules' pictures from left to right, all as high as the highest."""
    scenes = [frames_of(schedule) for schedule in schedules]
    height = max(_Layout(scene).height for scene in scenes)
    layouts = [_Layout(scene, height) for scene in scenes]
    parts, width = [], 0.0
    for layout in layouts:
        parts.append(_document(layout, relative_program=False, x=width))
        width += layout.width + 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width - 40:g} {height:g}" role="img">'
    return "\n".join([head, *(part.rstrip("\n") for part in parts), "</svg>", ""])


def _document(layout: _Layout, relative_program: bool, x: float = 0.0) -> str:
    lines = _frame_lines(layout)
    for transfer in layout.scene.transfers:
        pale = relative_program and 0 not in (transfer.source, transfer.target)
        lines += _arrow(layout, transfer, 0.15 if pale else 0.9)
    title, subtitle = caption(layout.scene.schedule)
    subtitle += "; ranks and chunks counted from r" if relative_program else ""
    place = f'x="{x:g}" ' if x else ""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {place}viewBox="0 0 {layout.width:g} {layout.height:g}" '
        f'width="{layout.width:g}" height="{layout.height:g}" role="img" font-family="{FONT}" fill="{GREY}">'
    )
    texts = [
        f"<title>{title}: {subtitle}</title>",
        f'<text x="{layout.left:g}" y="24" font-size="17" font-weight="600">{title}</text>',
        f'<text x="{layout.left:g}" y="43" font-size="12">{subtitle}</text>',
    ]
    return "\n".join([head, *texts, *_labels(layout, relative_program), *lines, "</svg>", ""])


def caption(schedule: Schedule) -> tuple[str, str]:
    """A title and a line of numbers."""
    counted = counts(schedule)
    least, most = min(counted.sent), max(counted.sent)
    sent = f"{'' if least == most else 'at most '}{_fraction(most)} sent per rank"
    rounds = f"{counted.rounds} round{'s' * (counted.rounds != 1)}"
    return schedule.name, rounds if schedule.collective == "barrier" else f"{rounds}, {sent}"


def colours(count: int) -> list[str]:
    """`count` colours of equal lightness around the circle (OKLCH, lightness 0.7, chroma 0.14)."""
    return [_oklch(0.70, 0.14, 2 * math.pi * (i / max(count, 1) + 0.07)) for i in range(count)]


@dataclass(frozen=True)
class _Box:
    """The position of a box, in the picture's units."""

    x: float
    y: float
    width: float
    height: float


class _Layout:
    """Computes all positions."""

    left = 74.0
    top = 92.0
    gap = 26.0  # between columns
    pad = 7.0  # between a panel's edge and its boxes
    box_height = 26.0

    def __init__(self, scene: Frames, height: float | None = None):
        """`height`: of the whole picture, at least what it is without; rounds stand further apart."""
        self.scene = scene
        schedule = scene.schedule
        self.boxes = schedule.world if scene.by_rank else schedule.parts
        self.box_width = min(16.0, max(4.0, 180.0 / self.boxes)) if self.boxes > 1 else 34.0
        self.space = 0.0 if scene.by_rank else min(3.0, self.box_width / 4)
        # all_to_all's blocks to give stand apart from the blocks it gets.
        self.divide = 10.0 if schedule.collective == "all_to_all" else 0.0
        inner = self.boxes * (self.box_width + self.space) - self.space + self.divide
        self.panel_width = inner + 2 * self.pad
        self.panel_height = self.box_height + 2 * self.pad
        self.between = 50.0 + min(30.0, 2.0 * schedule.world)  # between rows
        self.width = self.left + schedule.world * (self.panel_width + self.gap) - self.gap + 16
        rounds = len(scene.frames) - 1
        if height is not None and rounds > 0:
            self.between = (height - 16 - self.panel_height - self.top) / rounds - self.panel_height
        self.height = self.row(rounds) + self.panel_height + 16
        origins = schedule.world if scene.by_rank or schedule.collective == "all_to_all" else schedule.parts
        self.palette = colours(origins)

    def column(self, rank: int) -> float:
        return self.left + rank * (self.panel_width + self.gap)

    def row(self, moment: int) -> float:
        return self.top + moment * (self.panel_height + self.between)

    def box(self, moment: int, rank: int, index: int) -> _Box:
        x = self.column(rank) + self.pad + index * (self.box_width + self.space)
        x += self.divide if self.divide and index >= self.scene.schedule.world else 0.0
        return _Box(x, self.row(moment) + self.pad, self.box_width, self.box_height)

    def middle(self, rank: int, index: int) -> float:
        """The x from and to which arrows go."""
        if self.scene.by_rank:
            return self.column(rank) + self.panel_width / 2
        return self.box(0, rank, index).x + self.box_width / 2

    def colour(self, rank: int, content: Content) -> str:
        origin, ranks = content
        if self.scene.by_rank:
            return self.palette[rank]
        if self.scene.schedule.collective == "all_to_all":
            return self.palette[ranks.bit_length() - 1]
        return self.palette[origin]


def _labels(layout: _Layout, relative_program: bool) -> list[str]:
    schedule, scene = layout.scene.schedule, layout.scene
    lines = []
    for rank in range(schedule.world):
        middle = layout.column(rank) + layout.panel_width / 2
        name = f"rank {relative(rank, schedule.world) if relative_program else rank}"
        lines.append(_text(middle, layout.top - 22, name, 'font-size="13" font-weight="600"'))
        if schedule.hosts:
            lines.append(_text(middle, layout.top - 36, f"host {schedule.hosts[rank]}", 'font-size="10"'))
        if layout.box_width < 8:
            continue
        for index in range(layout.boxes):
            box = layout.box(0, rank, index)
            if layout.boxes > 1:
                lines.append(_text(box.x + box.width / 2, layout.top - 6, str(index), 'font-size="9" opacity="0.8"'))
    for moment in range(len(scene.frames) - 1):
        middle = layout.row(moment) + layout.panel_height + layout.between / 2
        found = {t.verb for t in scene.transfers if t.begins == moment}
        verbs = [verb for verb in ("reduce", "recv", "copy") if verb in found]
        lines.append(_text(layout.left / 2 - 4, middle - 2, f"round {moment}", 'font-size="12" font-weight="600"'))
        lines.append(_text(layout.left / 2 - 4, middle + 12, ", ".join(verbs), 'font-size="10"'))
    return lines


def _frame_lines(layout: _Layout) -> list[str]:
    lines = []
    for moment, frame in enumerate(layout.scene.frames):
        for rank, boxes in enumerate(frame):
            lines.append(
                f'<rect x="{layout.column(rank):g}" y="{layout.row(moment):g}" width="{layout.panel_width:g}" '
                f'height="{layout.panel_height:g}" rx="7" fill="{GREY}" fill-opacity="0.09"/>'
            )
            for index, content in enumerate(boxes):
                opacity = 0.3 if (moment, rank, index) in layout.scene.spent else 1.0
                if layout.scene.by_rank:
                    lines += _stripes(layout, moment, rank, content, opacity)
                else:
                    lines += _box(layout, layout.box(moment, rank, index), content, opacity)
    return lines


def _box(layout: _Layout, box: _Box, content: Content | None, opacity: float) -> list[str]:
    if content is None:
        return [_rect(box, f'fill="none" stroke="{GREY}" stroke-opacity="0.3"')]
    colour = layout.colour(0, content)
    height = round(box.height * content[1].bit_count() / layout.scene.whole, 2)
    filled = _Box(box.x, round(box.y + box.height - height, 2), box.width, height)
    lines = [_rect(filled, f'fill="{colour}" fill-opacity="{opacity:g}"')]
    if content[1].bit_count() < layout.scene.whole:
        lines.append(_rect(box, f'fill="none" stroke="{colour}" stroke-opacity="{0.6 * opacity:g}"'))
    return lines


def _stripes(layout: _Layout, moment: int, rank: int, content: Content | None, opacity: float) -> list[str]:
    lines = []
    for contributor in range(layout.boxes):
        held = content is not None and content[1] >> contributor & 1
        fill = f'fill="{layout.palette[contributor] if held else GREY}" fill-opacity="{opacity if held else 0.16:g}"'
        lines.append(_rect(layout.box(moment, rank, contributor), fill, radius=0))
    return lines


def _arrow(layout: _Layout, transfer: Transfer, opacity: float) -> list[str]:
    content = layout.scene.frames[transfer.begins][transfer.source][transfer.source_box]
    colour = layout.colour(transfer.source, content) if content else GREY
    x1, x2 = layout.middle(transfer.source, transfer.source_box), layout.middle(transfer.target, transfer.target_box)
    y1, y2 = layout.row(transfer.begins) + layout.panel_height + 1, layout.row(transfer.ends) - 1
    bend = min((y2 - y1) * 0.55, 60)
    path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - 6 - bend:g} {x2:g} {y2 - 6:g}"
    return [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.7" stroke-opacity="{opacity:g}"/>',
        f'<path d="M{x2 - 3.6:g} {y2 - 7:g}h7.2l-3.6 7z" fill="{colour}" fill-opacity="{opacity:g}"/>',
    ]


def _rect(box: _Box, style: str, radius: float = 2) -> str:
    return f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="{radius:g}" {style}/>'


def _text(x: float, y: float, what: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{what}</text>'


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


def text(schedule: Schedule, relative_program: bool = False) -> str:
    """The picture in characters: after each round every rank's chunks, ▁ to █ by contributions; between them the sends.

    `relative_program`: what any rank r does, in words; ValueError if ranks differ.
    """
    if relative_program:
        return _relative_program_text(schedule)
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
    for label, cells in rows:
        for line in range(max(len(cell) for cell in cells)):
            columns = [(cell[line] if line < len(cell) else "").ljust(width) for cell in cells]
            lines.append(f"{label if line == 0 else '':9}{'  '.join(columns)}".rstrip())
    return "\n".join(lines) + "\n"


def _relative_program_text(schedule: Schedule) -> str:
    world, lines = schedule.world, [": ".join(caption(schedule)), ""]

    def chunks(offsets: tuple[int, ...]) -> str:
        return "[" + ", ".join("0" if schedule.parts == 1 else relative(o, world) for o in offsets) + "]"

    for moment, actions in enumerate(program_of_any_rank(schedule)):
        words = []
        for verb, peer, offsets in actions:
            direction = "" if verb == "copy" else f" {'to' if verb == 'send' else 'from'} {relative(peer, world)}"
            words.append(f"{verb} {chunks(offsets)}{direction}")
        lines.append(f"round {moment:<3}{', '.join(words)}")
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
