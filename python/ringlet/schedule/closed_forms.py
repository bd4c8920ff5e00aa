"""The closed forms of every registered schedule, which the prover checks: rounds, bytes, roundings, summation orders.

p is the world, S the bytes (ringlet.schedule.collectives says of what), q the largest power of two <= p. If the
algorithm uses hosts, n is the number of hosts and k the ranks on each (the table has its form for one host). A new
algorithm needs a row here; without one, the prover says "none". Sources: the algorithm's C++ file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ringlet.schedule.hosts import ranks_by_host


@dataclass(frozen=True)
class ClosedForm:
    """`rounds(p)` of the busiest rank; `sent(p)` in units of S, of the busiest rank; `depth(p)` roundings; `trees(p)`.

    If nothing is summed, depth and trees are 0. The texts are for people.
    """

    rounds: Callable[[int], int]
    sent: Callable[[int], Fraction]
    depth: Callable[[int], int]
    trees: Callable[[int], int]
    rounds_text: str
    sent_text: str


def ceil_log2(p: int) -> int:
    return (p - 1).bit_length()


def floor_log2(p: int) -> int:
    return p.bit_length() - 1


def folded(p: int) -> int:
    """1 if a butterfly folds (p is no power of two), else 0."""
    return int(p & (p - 1) != 0)


def share(p: int) -> Fraction:
    """(p-1)/p"""
    return Fraction(p - 1, p)


def several(p: int) -> int:
    """0 for one rank alone, else 1."""
    return int(p > 1)


def ring_trees(p: int) -> int:
    """A chain starts at each rank; with two ranks both chains are the same sum."""
    return p if p > 2 else 1


def odd_part(p: int) -> int:
    """p without its factors of two: the number of the circulant's trees, as the prover found it."""
    return p // (p & -p)


def swing_steps(p: int) -> int:
    """ceil(log2 e), e being the even one of p and p-1: in an odd world the last rank does not swing."""
    return ceil_log2(max(p - p % 2, 1))


def swing_trees(p: int) -> int:
    """Ranks e/4 apart sum alike in powers of two; other worlds have fewer symmetries. As the prover found them."""
    if p % 2:
        return p if p > 5 else max(1, p - 2)
    return p // 2 if folded(p) else max(1, p // 4)


def ceil_log4(p: int) -> int:
    return (ceil_log2(p) + 1) // 2


def two_at_most(p: int) -> int:
    """Rounds of a rank in the middle, which receives and sends. The root and the last rank have one."""
    return min(p - 1, 2)


def torus_sides(p: int) -> tuple[int, int]:
    """Columns, the largest divisor up to the square root, and rows."""
    columns = max(divisor for divisor in range(1, math.isqrt(p) + 1) if p % divisor == 0)
    return columns, p // columns


def pat_trees(p: int) -> int:
    """A block's tree is the one before it turned by a rank; in powers of two, two each are alike."""
    return p if folded(p) else max(1, p // 2)


def one(p: int) -> int:
    return 1


def none(p: int) -> int:
    return 0


def _sends(units: int) -> Callable[[int], Fraction]:
    return lambda p: units * share(p)


HALVING_DOUBLING = ClosedForm(
    lambda p: 2 * floor_log2(p) + 2 * folded(p),
    lambda p: 2 * share(1 << floor_log2(p)) + folded(p),
    ceil_log2,
    one,
    "2 log2 q (+2)",
    "2S(q-1)/q (+S)",
)


def hierarchical(n: int) -> dict[str, ClosedForm]:
    """By collective, on n hosts of p/n ranks each."""

    def two(p: int) -> int:
        """One round for inside and one for across, each if it has more than one rank."""
        return several(n) + several(p // n)

    return {
        "all_reduce": ClosedForm(
            lambda p: 2 * several(p // n) + 2 * ceil_log2(n),
            _sends(2),
            lambda p: several(p // n) + ceil_log2(n),
            lambda p: odd_part(n),
            "2 + 2 ceil(log2 n)",
            "2S(p-1)/p",
        ),
        "reduce_scatter": ClosedForm(two, _sends(1), two, one, "2", "S(p-1)/p"),
        "all_gather": ClosedForm(two, _sends(1), none, none, "2", "S(p-1)/p"),
        "broadcast": ClosedForm(
            lambda p: 2 * several(p // n) + ceil_log2(n),
            lambda p: Fraction(2 * (p // n - 1) + ceil_log2(n), p // n),
            none,
            none,
            "2 + ceil(log2 n)",
            "S(2(k-1) + ceil(log2 n))/k",
        ),
    }


CLOSED_FORMS: dict[tuple[str, str], ClosedForm] = {
    ("ring", "all_reduce"): ClosedForm(
        lambda p: 2 * (p - 1), _sends(2), lambda p: p - 1, ring_trees, "2(p-1)", "2S(p-1)/p"
    ),
    ("butterfly", "all_reduce"): ClosedForm(
        lambda p: floor_log2(p) + 2 * folded(p),
        lambda p: Fraction(floor_log2(p) + folded(p)),
        ceil_log2,
        one,
        "log2 q (+2)",
        "S log2 q (+S)",
    ),
    ("halving_doubling", "all_reduce"): HALVING_DOUBLING,
    ("halving_doubling_far", "all_reduce"): HALVING_DOUBLING,
    ("circulant", "all_reduce"): ClosedForm(
        lambda p: 2 * ceil_log2(p), _sends(2), ceil_log2, odd_part, "2 ceil(log2 p)", "2S(p-1)/p"
    ),
    ("swing", "all_reduce"): ClosedForm(
        lambda p: 2 * swing_steps(p), _sends(2), swing_steps, swing_trees, "2 ceil(log2 e)", "2S(p-1)/p"
    ),
    ("recursive_multiplying", "all_reduce"): ClosedForm(
        lambda p: ceil_log4(1 << floor_log2(p)) + 2 * folded(p),
        lambda p: Fraction(3 * (floor_log2(p) // 2) + floor_log2(p) % 2 + folded(p)),
        lambda p: ceil_log4(1 << floor_log2(p)) + folded(p),
        one,
        "ceil(log4 q) (+2)",
        "3S a round, S in one of two (+S)",
    ),
    ("double_binary_tree", "all_reduce"): ClosedForm(
        lambda p: 2 * min(p // 2, 2),
        lambda p: Fraction(min(p, 4), 2) if p > 1 else Fraction(0),
        floor_log2,
        lambda p: 1 + int(p > 3),
        "4",
        "2S",
    ),
    ("torus", "all_reduce"): ClosedForm(
        lambda p: 2 * sum(torus_sides(p)) - 4,
        _sends(2),
        lambda p: sum(torus_sides(p)) - 2,
        lambda p: math.prod(map(ring_trees, torus_sides(p))),
        "2(c-1) + 2(r-1)",
        "2S(p-1)/p",
    ),
    ("one_shot", "all_reduce"): ClosedForm(several, lambda p: Fraction(p - 1), several, one, "1", "S(p-1)"),
    ("two_shot", "all_reduce"): ClosedForm(lambda p: 2 * several(p), _sends(2), several, one, "2", "2S(p-1)/p"),
    ("star", "all_reduce"): ClosedForm(
        lambda p: 2 * several(p), lambda p: Fraction(p - 1), several, one, "2", "S(p-1)"
    ),
    ("ring", "reduce_scatter"): ClosedForm(lambda p: p - 1, _sends(1), lambda p: p - 1, ring_trees, "p-1", "S(p-1)/p"),
    ("circulant", "reduce_scatter"): ClosedForm(ceil_log2, _sends(1), ceil_log2, odd_part, "ceil(log2 p)", "S(p-1)/p"),
    ("swing", "reduce_scatter"): ClosedForm(
        swing_steps, _sends(1), swing_steps, swing_trees, "ceil(log2 e)", "S(p-1)/p"
    ),
    ("pat", "reduce_scatter"): ClosedForm(ceil_log2, _sends(1), ceil_log2, pat_trees, "ceil(log2 p)", "S(p-1)/p"),
    ("two_shot", "reduce_scatter"): ClosedForm(several, _sends(1), several, one, "1", "S(p-1)/p"),
    ("ring", "all_gather"): ClosedForm(lambda p: p - 1, _sends(1), none, none, "p-1", "S(p-1)/p"),
    ("circulant", "all_gather"): ClosedForm(ceil_log2, _sends(1), none, none, "ceil(log2 p)", "S(p-1)/p"),
    ("swing", "all_gather"): ClosedForm(swing_steps, _sends(1), none, none, "ceil(log2 e)", "S(p-1)/p"),
    ("pat", "all_gather"): ClosedForm(ceil_log2, _sends(1), none, none, "ceil(log2 p)", "S(p-1)/p"),
    ("bruck", "all_gather"): ClosedForm(ceil_log2, _sends(1), none, none, "ceil(log2 p)", "S(p-1)/p"),
    ("two_shot", "all_gather"): ClosedForm(several, _sends(1), none, none, "1", "S(p-1)/p"),
    ("tree", "broadcast"): ClosedForm(
        ceil_log2, lambda p: Fraction(ceil_log2(p)), none, none, "ceil(log2 p)", "S ceil(log2 p)"
    ),
    ("double_binary_tree", "broadcast"): ClosedForm(two_at_most, lambda p: Fraction(several(p)), none, none, "2", "S"),
    ("bine", "broadcast"): ClosedForm(
        ceil_log2, lambda p: Fraction(ceil_log2(p)), none, none, "ceil(log2 p)", "S ceil(log2 p)"
    ),
    ("knomial", "broadcast"): ClosedForm(
        ceil_log4,
        lambda p: Fraction(sum(min(3, (p - 1) >> shift) for shift in range(0, p.bit_length(), 2))),
        none,
        none,
        "ceil(log4 p)",
        "3S a round",
    ),
    ("chain", "broadcast"): ClosedForm(two_at_most, lambda p: Fraction(several(p)), none, none, "2", "S"),
    ("star", "broadcast"): ClosedForm(several, lambda p: Fraction(p - 1), none, none, "1", "S(p-1)"),
    ("tree", "reduce"): ClosedForm(ceil_log2, lambda p: Fraction(several(p)), ceil_log2, one, "ceil(log2 p)", "S"),
    ("double_binary_tree", "reduce"): ClosedForm(
        two_at_most, lambda p: Fraction(several(p)), ceil_log2, lambda p: 1 + int(p > 4), "2", "S"
    ),
    ("bine", "reduce"): ClosedForm(ceil_log2, lambda p: Fraction(several(p)), ceil_log2, one, "ceil(log2 p)", "S"),
    ("knomial", "reduce"): ClosedForm(ceil_log4, lambda p: Fraction(several(p)), ceil_log4, one, "ceil(log4 p)", "S"),
    ("chain", "reduce"): ClosedForm(two_at_most, lambda p: Fraction(several(p)), lambda p: p - 1, one, "2", "S"),
    ("star", "reduce"): ClosedForm(several, lambda p: Fraction(several(p)), several, one, "1", "S"),
    ("linear", "gather"): ClosedForm(several, lambda p: Fraction(several(p), p), none, none, "1", "S/p"),
    ("linear", "scatter"): ClosedForm(several, _sends(1), none, none, "1", "S(p-1)/p"),
    ("pairwise", "all_to_all"): ClosedForm(one, _sends(1), none, none, "1", "S(p-1)/p"),
    ("dissemination", "barrier"): ClosedForm(ceil_log2, lambda p: Fraction(0), none, none, "ceil(log2 p)", "0"),
    **{("hierarchical", collective): form for collective, form in hierarchical(1).items()},
}


def closed_form(algorithm: str, collective: str, hosts: Sequence[int]) -> ClosedForm | None:
    """The form on file, for `hosts` as in a Schedule. Only the form of `hierarchical` depends on the hosts."""
    if algorithm != "hierarchical" or not hosts:
        return CLOSED_FORMS.get((algorithm, collective))
    return hierarchical(len(set(hosts))).get(collective) if regular(hosts) else None


def regular(hosts: Sequence[int]) -> bool:
    """Whether all hosts have equally many ranks, and their first ranks, second ranks, ... one order: block, cyclic."""
    ranks = ranks_by_host(hosts)
    if len({len(on_host) for on_host in ranks}) > 1:
        return False
    indices = range(len(ranks[0]))
    return len({tuple(sorted(range(len(ranks)), key=lambda h: ranks[h][i])) for i in indices}) == 1
