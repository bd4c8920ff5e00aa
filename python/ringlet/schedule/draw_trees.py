"""Draws summation trees: a panel for each library, with its message's segments and the tree of each of them.

Leaves are the ranks' inputs. A filled circle adds its terms left to right and rounds once; a hollow one does not round;
a square adds its terms at once. The same trees always give the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ringlet.schedule.draw import GREY, colours, document, label
from ringlet.schedule.expression_trees import Trees, ranks_in

LEAF_STEP, LEVEL_STEP, RADIUS = 26.0, 30.0, 9.0
WIDTH, MARGIN, BAR_TOP, BAR_HEIGHT, TREES_TOP = 540.0, 16.0, 66.0, 18.0, 112.0
MOST_TREES = 16  # of a panel


Revealed = Mapping[str, Any]  # of one library, as `ringlet reveal --json` writes it


def svg(found: Sequence[Revealed]) -> str:
    """One SVG document with a panel for each library, from left to right."""
    drawn = [_panel(one, MARGIN + k * (WIDTH + 2 * MARGIN)) for k, one in enumerate(found)]
    width, height = len(found) * (WIDTH + 2 * MARGIN), max(bottom for _, bottom, _ in drawn) + MARGIN
    return document(width, height, [line for lines, _, _ in drawn for line in lines], "; ".join(t for _, _, t in drawn))


def _panel(one: Revealed, left: float) -> tuple[list[str], float, str]:
    """The lines, the y of the lower end, and what they show, as text: the largest message with the most orders."""
    seen = max(one["messages"], key=lambda seen: (len(set(seen["layouts"][0]["orders"])), seen["elements"]))
    layout, title = seen["layouts"][0], f"{one['target']}, {one['world']} ranks"
    used = list(dict.fromkeys(layout["orders"]))
    texts, palette = [one["orders"][order]["text"] for order in used], colours(len(used))
    elements = seen["elements"] * (one["world"] if one["collective"] == "reduce_scatter" else 1)
    runs = [(start, used.index(order)) for start, order in zip(layout["starts"], layout["orders"], strict=True)]
    lines = [
        label(left, 24, title, 17, 'font-weight="600"'),
        label(left, 43, f"{one['version']}: {one['collective']} of {seen['elements']:,} {one['dtype']}", 12),
        *_bar(elements, runs, left, palette),
    ]
    x, y, row = left, TREES_TOP, 0.0
    for number, text in list(enumerate(texts))[:MOST_TREES]:
        picture, width, height = _tree(text, palette[number])
        if x > left and x + width > left + WIDTH:
            x, y, row = left, y + row, 0.0
        named = f"{letter(number)}  {text}"
        lines.append(f'<g transform="translate({x:g} {y:g})">')
        lines += [label(0, 12, named, 12, f'fill="{palette[number]}" font-weight="600"'), *picture, "</g>"]
        x, row = x + max(width, 7.0 * len(named)) + 20, max(row, height + 20)
    if len(texts) > MOST_TREES:
        lines.append(label(left, y + row + 12, f"and {len(texts) - MOST_TREES} more", 12))
        row += 20
    return lines, y + row, f"{title}: {', '.join(texts)}"


def _bar(elements: int, runs: Sequence[tuple[int, int]], left: float, palette: Sequence[str]) -> list[str]:
    """The message from its first element to its last. runs: the first element of each, and the number of its tree."""
    lines = []
    for (start, tree), (end, _) in itertools.pairwise([*runs, (elements, 0)]):
        x, width = left + WIDTH * start / elements, WIDTH * (end - start) / elements
        lines.append(
            f'<rect x="{x:.2f}" y="{BAR_TOP:g}" width="{width:.2f}" height="{BAR_HEIGHT:g}" fill="{palette[tree]}"/>'
        )
        if width > 14:
            style = f'font-weight="600" text-anchor="middle" fill="{_ON_COLOUR}"'
            lines.append(label(x + width / 2, BAR_TOP + 13, letter(tree), 11, style))
    lines.append(label(left, BAR_TOP - 5, "element 0", 10))
    lines.append(label(left + WIDTH, BAR_TOP - 5, f"{elements - 1:,}", 10, 'text-anchor="end"'))
    return lines


def _tree(text: str, colour: str) -> tuple[list[str], float, float]:
    """(lines, width, height); the first line's room is left to the label."""
    trees = Trees()
    try:
        root = trees.parse(text)
    except ValueError:
        return [], 0.0, LEVEL_STEP
    levels: dict[int, int] = {}
    places: dict[int, float] = {}
    leaves = 0

    def place(tree: int) -> None:
        nonlocal leaves
        for term in trees.terms(tree):
            place(term)
        terms = trees.terms(tree)
        levels[tree] = 1 + max(levels[term] for term in terms) if terms else 0
        places[tree] = sum(places[term] for term in terms) / len(terms) if terms else leaves
        leaves += not terms

    place(root)
    bottom = 28 + levels[root] * LEVEL_STEP

    def position(tree: int) -> tuple[float, float]:
        return RADIUS + places[tree] * LEAF_STEP, bottom - levels[tree] * LEVEL_STEP

    lines = [_edge(position(tree), position(term), colour) for tree in sorted(places) for term in trees.terms(tree)] + [
        _node(trees, tree, position(tree), colour) for tree in sorted(places)
    ]
    return lines, 2 * RADIUS + (leaves - 1) * LEAF_STEP, bottom + RADIUS + 2


def _edge(upper: tuple[float, float], lower: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = upper, lower
    middle = y1 + LEVEL_STEP / 2
    path = f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {y1:g} {x2:g} {min(y2, y1 + LEVEL_STEP):g}V{y2:g}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.7"/>'


def _node(trees: Trees, tree: int, position: tuple[float, float], colour: str) -> str:
    x, y = position
    if not trees.terms(tree):
        rank = ranks_in(trees.ranks[tree])[0]
        circle = f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS:g}" fill="{GREY}"/>'
        return circle + label(x, y + 4, str(rank), 11, f'text-anchor="middle" fill="{_ON_COLOUR}"')
    fill = colour if trees.is_rounded(tree) else _ON_COLOUR
    if trees.is_at_once(tree):
        return f'<rect x="{x - 5:g}" y="{y - 5:g}" width="10" height="10" fill="{fill}" stroke="{colour}"/>'
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{fill}" stroke="{colour}" stroke-width="1.7"/>'


_ON_COLOUR = "#ffffff"


def letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)
