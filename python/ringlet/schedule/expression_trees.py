"""Expression trees over the ranks' contributions, hash-consed: equal trees have equal numbers, and equal texts.

A leaf is a rank's own input. A node combines its terms left to right and rounds once. Addition commutes but is not
associative, so two trees are the same when they differ only in the order of a node's first two terms.

A schedule has no other nodes. A library may also keep a node's sum in a wider accumulator ("{0+1}": not rounded), or
add terms at once, aligned to the largest ("(0,1,2)": their order does not matter).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WIDE, _AT_ONCE = 1, 2


class Trees:
    """A growing table. `ranks[t]` is the bit mask of the ranks in tree t, `depth[t]` the roundings on the way up."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.depth: list[int] = []
        self._nodes: list[tuple[int, tuple[int, ...]]] = []  # (kind, terms), or (-1 - rank, ()) of a leaf
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def leaf(self, rank: int) -> int:
        key = (-1 - rank, ())
        return self._numbers[key] if key in self._numbers else self._add(key, 1 << rank, 0)

    def combine(self, terms: Sequence[int], *, rounds: bool = True, at_once: bool = False) -> int:
        """The node of two or more trees. The caller makes sure that no rank contributes twice.

        rounds: the sum is rounded to the dtype. at_once: the order of the terms does not matter.
        """
        free = len(terms) if at_once else 2  # these terms commute: the one with the lowest rank is first
        key = (
            (0 if rounds else _WIDE) | (_AT_ONCE if at_once and len(terms) > 2 else 0),
            (*sorted(terms[:free], key=lambda term: self.ranks[term] & -self.ranks[term]), *terms[free:]),
        )
        if key in self._numbers:
            return self._numbers[key]
        ranks = 0
        for term in terms:
            ranks |= self.ranks[term]
        return self._add(key, ranks, rounds + max(self.depth[term] for term in terms))

    def terms(self, tree: int) -> tuple[int, ...]:
        """The trees that a node combines; none of a leaf."""
        return self._nodes[tree][1]

    def is_rounded(self, tree: int) -> bool:
        """Whether the value is of the dtype; False: of a wider accumulator."""
        kind = self._nodes[tree][0]
        return kind < 0 or not kind & _WIDE

    def is_at_once(self, tree: int) -> bool:
        """Whether the order of its terms does not matter."""
        kind = self._nodes[tree][0]
        return kind > 0 and bool(kind & _AT_ONCE)

    def text(self, tree: int) -> str:
        """ "((0+1)+(2+3))"; "(0+1+2)" is one node with three terms."""
        kind, terms = self._nodes[tree]
        if kind < 0:
            return str(-1 - kind)
        first, last = "{}" if kind & _WIDE else "()"
        return first + ("," if kind & _AT_ONCE else "+").join(map(self.text, terms)) + last

    def parse(self, text: str) -> int:
        """The tree with that text. ValueError if there is none."""
        words = re.findall(r"\d+|.", text)[::-1]

        def node() -> int:
            word = words.pop()
            if word.isdecimal():
                return self.leaf(int(word))
            last, terms, between = {"(": ")", "{": "}"}[word], [node()], ""
            while (word := words.pop()) != last:
                between = between or word
                terms.append(node())
            return self.combine(terms, rounds=last == ")", at_once=between == ",")

        try:
            tree = node()
        except LookupError:
            words = [text]
        if words:
            raise ValueError(f"{text!r} is no tree")
        return tree

    def _add(self, key: tuple[int, tuple[int, ...]], ranks: int, depth: int) -> int:
        number = self._numbers[key] = len(self._nodes)
        self._nodes.append(key)
        self.ranks.append(ranks)
        self.depth.append(depth)
        return number


def aligned(first: int, count: int) -> str:
    """The text of the aligned tree of `count` ranks, a power of two, from rank `first` on: "((0+1)+(2+3))" of 4."""
    half = count // 2
    return str(first) if count == 1 else f"({aligned(first, half)}+{aligned(first + half, half)})"


def ranks_in(mask: int) -> list[int]:
    """The ranks of a bit mask, ascending."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
