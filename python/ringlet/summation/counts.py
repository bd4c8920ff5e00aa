"""From counts to a tree: the sizes of the smallest subtrees that hold each pair of ranks determine the whole tree.

Source: FPRev (Xie et al. 2024, arXiv 2411.00442), which does it for the sums of arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ringlet.schedule.expression_trees import Trees, ranks_in

# A rank, or the nodes that are added; more than two: at once.
Node = Any


class NotATreeError(ValueError):
    """No tree has these sizes; the message says why."""


def tree_of(sizes: Mapping[tuple[int, int], int], ranks: int) -> Node:
    """The tree over a mask of ranks. sizes[i, j], i < j: how many ranks the smallest subtree with both has."""
    members = ranks_in(ranks)
    if len(members) == 1:
        return members[0]
    parts: list[int] = []
    for rank in members:
        near = 1 << rank
        for part in [part for part in parts if any(_size(sizes, rank, one) < len(members) for one in ranks_in(part))]:
            parts.remove(part)
            near |= part
        parts.append(near)
    parts.sort(key=lambda part: part & -part)
    if len(parts) == 1:
        raise NotATreeError(f"the ranks {_listed(ranks)} are added up, but no sum of them is the last")
    for number, part in enumerate(parts):
        for i, j in ((i, j) for other in parts[number + 1 :] for i in ranks_in(part) for j in ranks_in(other)):
            if _size(sizes, i, j) != len(members):
                raise NotATreeError(
                    f"ranks {i} and {j} meet in a sum of {_size(sizes, i, j)} ranks, and yet the ranks "
                    f"{_listed(ranks)} are added up without the others"
                )
    return tuple(tree_of(sizes, part) for part in parts)


def mask_of(node: Node) -> int:
    """The ranks in it."""
    return 1 << node if isinstance(node, int) else sum(map(mask_of, node))


def inner_sums(node: Node) -> Iterator[tuple[int, int]]:
    """(ranks of a sum, ranks that it is added to) of every sum but the last, outer ones first."""
    if isinstance(node, int):
        return
    masks = [mask_of(child) for child in node]
    for child, mask in zip(node, masks, strict=True):
        if not isinstance(child, int):
            yield mask, next(other for other in masks if other != mask)
        yield from inner_sums(child)


def number_in(trees: Trees, node: Node, wide: Collection[int] = ()) -> int:
    """The number of the tree in the prover's table. wide: the ranks of sums that are not rounded to the dtype.

    A sum that is not rounded before the next term comes is one node with that: ((0+1)+2) is (0+1+2).
    """
    if isinstance(node, int):
        return trees.leaf(node)
    if len(node) > 2:
        terms = [number_in(trees, child, wide) for child in node]
        return trees.combine(terms, rounds=mask_of(node) not in wide, at_once=True)
    return trees.combine(_terms(trees, node, wide), rounds=mask_of(node) not in wide)


def _terms(trees: Trees, node: Node, wide: Collection[int]) -> list[int]:
    growing = [child for child in node if not isinstance(child, int) and len(child) == 2 and mask_of(child) in wide]
    if len(growing) != 1:
        return [number_in(trees, child, wide) for child in node]
    other = next(child for child in node if child is not growing[0])
    return [*_terms(trees, growing[0], wide), number_in(trees, other, wide)]


def as_program(node: Node, wide: Collection[int] = ()) -> Any:
    """As the ranks evaluate it: a rank, or (whether it is rounded, term, term); None if it adds terms at once."""
    if isinstance(node, int):
        return node
    terms = [as_program(child, wide) for child in node]
    return None if len(terms) > 2 or None in terms else (mask_of(node) not in wide, *terms)


def _size(sizes: Mapping[tuple[int, int], int], a: int, b: int) -> int:
    return sizes[min(a, b), max(a, b)]


def _listed(ranks: int) -> str:
    return ", ".join(map(str, ranks_in(ranks)))
