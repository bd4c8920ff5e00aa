"""The closed forms of the built-in schedules, which the prover checks and the tables show: one formula for both.

p is the world, q the largest power of two <= p, e the even one of p and p-1. S is the bytes, as
ringlet.schedule.collectives says. On hosts, n is their number and k the ranks on each. A torus has c columns and r
rows. (p>q) is 1 if p is no power of two, else 0. Rounds and bytes are those of the busiest rank. A new algorithm needs
a row here; without one, the prover says "none". Sources: the algorithm's C++ file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ringlet.schedule.hosts import ranks_by_host


def odd(p: int) -> int:
    """p without its factors of two: the number of the circulant's trees, as the prover found it."""
    return p // (p & -p)


def swing_trees(p: int) -> int:
    """Ranks e/4 apart sum alike in powers of two; other worlds have fewer symmetries. As the prover found them."""
    if p % 2:
        return p if p > 5 else p - 2
    return p // 2 if p & (p - 1) else max(1, p // 4)


def degree(p: int) -> int:
    """The children of the root of a 4-nomial tree."""
    return sum(min(3, (p - 1) >> shift) for shift in range(0, p.bit_length(), 2))


_FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "log2": math.log2, "min": min}
_FUNCTIONS |= {one.__name__: one for one in (odd, swing_trees, degree)}


@dataclass(frozen=True)
class ClosedForm:
    """Formulas for a world of at least 2: rounds, bytes sent, roundings, and orders of summation (0: no sums)."""

    rounds: str
    sent: str
    depth: str = "0"
    trees: str = "0"

    def at(self, p: int, n: int = 1) -> tuple[Fraction, ...]:
        """The values of the four formulas, `sent` in units of S."""
        q, columns = 1 << p.bit_length() - 1, max(c for c in range(1, math.isqrt(p) + 1) if p % c == 0)
        known = {"p": p, "q": q, "e": p - p % 2, "n": n, "k": p // n, "c": columns, "r": p // columns}
        names: dict[str, Any] = {"S": Fraction(1), **known, **_FUNCTIONS}
        return tuple(Fraction(eval(one, names)) for one in (self.rounds, self.sent, self.depth, self.trees))


def shown(formula: str) -> str:
    """A formula for people: "2*S*(p-1)/p" -> "2S(p-1)/p", "2*ceil(log2(p))" -> "2 ceil(log2(p))"."""
    return re.sub(r"\*(?=[a-z])", " ", formula).replace("*", "")


_LOG, _SHARE, _FOLD = "ceil(log2(p))", "S*(p-1)/p", "(p>q)"
_HALVING_DOUBLING = ClosedForm(f"2*log2(q) + 2*{_FOLD}", f"2*S*(q-1)/q + S*{_FOLD}", _LOG, "1")
_RING_TREES = "p - (p==2)"  # a chain starts at each rank; with two ranks both chains are the same sum

CLOSED_FORMS: dict[tuple[str, str], ClosedForm] = {
    ("ring", "all_reduce"): ClosedForm("2*(p-1)", f"2*{_SHARE}", "p-1", _RING_TREES),
    ("butterfly", "all_reduce"): ClosedForm(f"log2(q) + 2*{_FOLD}", f"S*log2(q) + S*{_FOLD}", _LOG, "1"),
    ("halving_doubling", "all_reduce"): _HALVING_DOUBLING,
    ("halving_doubling_far", "all_reduce"): _HALVING_DOUBLING,
    ("circulant", "all_reduce"): ClosedForm(f"2*{_LOG}", f"2*{_SHARE}", _LOG, "odd(p)"),
    ("swing", "all_reduce"): ClosedForm("2*ceil(log2(e))", f"2*{_SHARE}", "ceil(log2(e))", "swing_trees(p)"),
    ("recursive_multiplying", "all_reduce"): ClosedForm(
        f"ceil(log2(q)/2) + 2*{_FOLD}",
        f"3*S*floor(log2(q)/2) + S*(log2(q)%2) + S*{_FOLD}",
        f"ceil(log2(q)/2) + {_FOLD}",
        "1",
    ),
    ("double_binary_tree", "all_reduce"): ClosedForm("2*min(p//2, 2)", "S*min(p, 4)/2", "log2(q)", "1 + (p>3)"),
    ("torus", "all_reduce"): ClosedForm("2*(c-1) + 2*(r-1)", f"2*{_SHARE}", "c+r-2", "(c - (c==2)) * (r - (r==2))"),
    ("one_shot", "all_reduce"): ClosedForm("1", "S*(p-1)", "1", "1"),
    ("two_shot", "all_reduce"): ClosedForm("2", f"2*{_SHARE}", "1", "1"),
    ("star", "all_reduce"): ClosedForm("2", "S*(p-1)", "1", "1"),
    ("hierarchical", "all_reduce"): ClosedForm(
        "2*(k>1) + 2*ceil(log2(n))", f"2*{_SHARE}", "(k>1) + ceil(log2(n))", "odd(n)"
    ),
    ("ring", "reduce_scatter"): ClosedForm("p-1", _SHARE, "p-1", _RING_TREES),
    ("circulant", "reduce_scatter"): ClosedForm(_LOG, _SHARE, _LOG, "odd(p)"),
    ("swing", "reduce_scatter"): ClosedForm("ceil(log2(e))", _SHARE, "ceil(log2(e))", "swing_trees(p)"),
    # A block's tree is the one before it turned by a rank; in powers of two, two each are alike.
    ("pat", "reduce_scatter"): ClosedForm(_LOG, _SHARE, _LOG, "p if p>q else p//2"),
    ("two_shot", "reduce_scatter"): ClosedForm("1", _SHARE, "1", "1"),
    ("hierarchical", "reduce_scatter"): ClosedForm("(k>1) + (n>1)", _SHARE, "(k>1) + (n>1)", "1"),
    ("ring", "all_gather"): ClosedForm("p-1", _SHARE),
    ("circulant", "all_gather"): ClosedForm(_LOG, _SHARE),
    ("swing", "all_gather"): ClosedForm("ceil(log2(e))", _SHARE),
    ("pat", "all_gather"): ClosedForm(_LOG, _SHARE),
    ("bruck", "all_gather"): ClosedForm(_LOG, _SHARE),
    ("two_shot", "all_gather"): ClosedForm("1", _SHARE),
    ("hierarchical", "all_gather"): ClosedForm("(k>1) + (n>1)", _SHARE),
    ("tree", "broadcast"): ClosedForm(_LOG, f"S*{_LOG}"),
    ("double_binary_tree", "broadcast"): ClosedForm("min(p-1, 2)", "S"),
    ("bine", "broadcast"): ClosedForm(_LOG, f"S*{_LOG}"),
    ("knomial", "broadcast"): ClosedForm("ceil(log2(p)/2)", "S*degree(p)"),
    ("chain", "broadcast"): ClosedForm("min(p-1, 2)", "S"),
    ("star", "broadcast"): ClosedForm("1", "S*(p-1)"),
    ("hierarchical", "broadcast"): ClosedForm("2*(k>1) + ceil(log2(n))", "S*(2*(k-1) + ceil(log2(n)))/k"),
    ("tree", "reduce"): ClosedForm(_LOG, "S", _LOG, "1"),
    ("double_binary_tree", "reduce"): ClosedForm("min(p-1, 2)", "S", _LOG, "1 + (p>4)"),
    ("bine", "reduce"): ClosedForm(_LOG, "S", _LOG, "1"),
    ("knomial", "reduce"): ClosedForm("ceil(log2(p)/2)", "S", "ceil(log2(p)/2)", "1"),
    ("chain", "reduce"): ClosedForm("min(p-1, 2)", "S", "p-1", "1"),
    ("star", "reduce"): ClosedForm("1", "S", "1", "1"),
    ("linear", "gather"): ClosedForm("1", "S/p"),
    ("linear", "scatter"): ClosedForm("1", _SHARE),
    ("pairwise", "all_to_all"): ClosedForm("1", _SHARE),
    ("dissemination", "barrier"): ClosedForm(_LOG, "0"),
}
_ALONE, _ALONE_SUMMING = ClosedForm("0", "0"), ClosedForm("0", "0", "0", "1")  # a world of one rank


def closed_form(algorithm: str, collective: str, hosts: Sequence[int], world: int) -> ClosedForm | None:
    """The form on file, for `hosts` as in a Schedule. None if there is none for these hosts.

    The form of `hierarchical` is of regular hosts. Of five ranks, `swing` has a tree more where the order of the ranks
    puts the two terms of a round the other way.
    """
    form = CLOSED_FORMS.get((algorithm, collective))
    if form is None or (algorithm == "hierarchical" and hosts and not regular(hosts)):
        return None
    if algorithm == "swing" and world == 5 and list(hosts) != sorted(hosts):
        return None
    if world > 1 or collective == "all_to_all":  # a rank alone copies its block, in one round
        return form
    return _ALONE if form.trees == "0" else _ALONE_SUMMING


def regular(hosts: Sequence[int]) -> bool:
    """Whether all hosts have equally many ranks, and their first ranks, second ranks, ... one order: block, cyclic."""
    ranks = ranks_by_host(hosts)
    if len({len(on_host) for on_host in ranks}) > 1:
        return False
    indices = range(len(ranks[0]))
    return len({tuple(sorted(range(len(ranks)), key=lambda h: ranks[h][i])) for i in indices}) == 1
