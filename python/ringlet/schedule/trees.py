"""Expression trees over the ranks' contributions, hash-consed: equal trees have equal numbers.

A leaf is a rank's own input. A node combines its terms left to right and rounds once. Addition commutes but is not
associative, so two trees are the same when they differ only in the order of a node's first two terms.
"""

from __future__ import annotations

from collections.abc import Sequence


class Trees:
    """A growing table. `ranks[t]` is the bit mask of the ranks in tree t, `depth[t]` the roundings on the way up."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.depth: list[int] = []
        self._terms: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def leaf(self, rank: int) -> int:
        # Negative, so that a leaf's key cannot be a node's.
        key = (-1 - rank,)
        return self._numbers[key] if key in self._numbers else self._add(key, 1 << rank, 0)

    def combine(self, terms: Sequence[int]) -> int:
        """The node of two or more trees. The caller makes sure that no rank contributes twice."""
        first, second, *rest = terms
        key = (first, second, *rest) if first < second else (second, first, *rest)
        if key in self._numbers:
            return self._numbers[key]
        ranks = 0
        for term in key:
            ranks |= self.ranks[term]
        return self._add(key, ranks, 1 + max(self.depth[term] for term in key))

    def text(self, tree: int) -> str:
        """ "((0+1)+(2+3))"; "(0+1+2)" is one node with three terms."""
        terms = self._terms[tree]
        if terms[0] < 0:
            return str(-1 - terms[0])
        return "(" + "+".join(map(self.text, terms)) + ")"

    def _add(self, key: tuple[int, ...], ranks: int, depth: int) -> int:
        number = self._numbers[key] = len(self._terms)
        self._terms.append(key)
        self.ranks.append(ranks)
        self.depth.append(depth)
        return number


def ranks_in(mask: int) -> list[int]:
    """The ranks of a bit mask, ascending."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
