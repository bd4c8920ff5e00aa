"""Sees the summation order of one call: tells all ranks which numbers to add, and reads the order from the results.

1. Rank i adds +big, rank j -big, the others 1. `big` absorbs every 1 that joins it before the two meet, so the result
   counts the ranks that joined later, and p minus it is the size of the smallest subtree with i and j. p(p-1)/2 calls
   give the trees of all elements at once (summation/counts.py).
2. For each inner sum of the tree: does it lose a 1 beside a number just large enough? Then it is rounded to the dtype;
   otherwise the sum goes on in a wider accumulator. At most p - 2 calls.
3. Random numbers: do all ranks and calls give the same bits, and those of the trees? If not, ordinary numbers are added
   in another order than the probe's.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringlet.bench.ranks.case import ITEM_BYTES, Case
from ringlet.errors import InvalidUsage
from ringlet.schedule.expression_trees import Trees, ranks_in
from ringlet.summation.counts import Node, NotATreeError, as_program, inner_sums, number_in, tree_of

# Gives all ranks a command of bench/ranks/probe.py; their answers in rank order.
Ask = Callable[[dict[str, Any]], list[dict[str, Any]]]
REVEALED = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Numbers:
    """A dtype's probe. `big` absorbs `most_ranks - 2` times `unit`, in float32 too, and counts are exact up to that."""

    big: float
    unit: float
    digits: int  # of the significand
    most_ranks: int

    def just_large(self, world: int) -> float:
        """Absorbs the units of all ranks if it is rounded to the dtype, and only then."""
        return self.unit * 2.0 ** (self.digits + 1 + math.ceil(math.log2(world)))


NUMBERS = {
    "float64": Numbers(2.0**1023, 1.0, 53, 1 << 10),
    "float32": Numbers(2.0**127, 1.0, 24, 1 << 10),
    "bfloat16": Numbers(2.0**127, 1.0, 8, 258),
    "float16": Numbers(2.0**15, 2.0**-14, 11, 18),
}


@dataclass(frozen=True)
class Order:
    """One summation order. text: of its tree, or what there is instead; depth: roundings to the dtype on the way up."""

    text: str
    depth: int
    is_tree: bool = True
    is_widened: bool = False  # some of its sums are not rounded to the dtype
    node: Node = None
    program: Any = None  # as bench/ranks/probe.py takes it


@dataclass(frozen=True)
class Layout:
    """The orders of a message's elements: `orders[k]` from element `starts[k]` on."""

    starts: tuple[int, ...]
    orders: tuple[Order, ...]

    @property
    def distinct(self) -> tuple[Order, ...]:
        """In the order of their first elements."""
        return tuple(dict.fromkeys(self.orders))

    def order_of(self, element: int) -> Order:
        return self.orders[bisect.bisect(self.starts, element) - 1]


@dataclass(frozen=True)
class Seen:
    """One message. layouts: one, or that of each rank if they differ."""

    count: int
    layouts: tuple[Layout, ...]
    sweeps_differ: bool = False
    bits_differ: tuple[str, ...] = ()  # "ranks", "calls": of the sums of random numbers
    wrong: int | None = 0  # random sums that are not the tree's; None: not compared
    accumulator: str = ""

    @property
    def layout(self) -> Layout:
        return self.layouts[0]


class Probe:
    """Sees the messages of one call. `case.count` is replaced by that of each message."""

    def __init__(self, ask: Ask, case: Case) -> None:
        self._ask, self.case = ask, case
        self.numbers = numbers_of(case)
        self._trees = Trees()
        self._orders: dict[tuple[float, ...], Order] = {}
        self._pairs = list(itertools.combinations(range(case.world), 2))

    def see(self, count: int, *, sweeps: int = 2, offset: int = 0, in_place: bool = True) -> Seen:
        """Everything about messages of `count` elements. Collective. InvalidUsage if the call does not sum."""
        place = {"offset": offset, "in_place": in_place}
        found = [self._sweep(count, place) for _ in range(sweeps)]
        layouts = self._with_roundings(count, found[-1], place)
        return self._with_random(Seen(count, layouts, any(one != found[0] for one in found)), sweeps, place)

    def orders(self, count: int) -> tuple[Order, ...]:
        """The distinct orders alone, as rank 0 has them."""
        place = {"offset": 0, "in_place": True}
        return self._with_roundings(count, self._sweep(count, place), place)[0].distinct

    def _sweep(self, count: int, place: dict[str, Any]) -> tuple[Layout, ...]:
        unit, big = self.numbers.unit, self.numbers.big
        calls = [[[unit]] * self.case.world]
        for i, j in self._pairs:
            values = [[unit]] * self.case.world
            values[i], values[j] = [big], [-big]
            calls.append(values)
        answers = self._do("constants", count, place, starts=[0], values=calls)
        layouts = [self._layout(rank, answer) for rank, answer in enumerate(answers)]
        return self._whole(layouts)

    def _whole(self, layouts: list[Layout]) -> tuple[Layout, ...]:
        """Of the whole message: every rank has it all, rank 0 has, or every rank has its block."""
        if self.case.collective == "reduce":
            return (layouts[0],)
        if self.case.collective == "all_reduce":
            return tuple(layouts) if any(one != layouts[0] for one in layouts) else (layouts[0],)
        return (_joined([run for one in layouts for run in zip(one.starts, one.orders, strict=True)]),)

    def _layout(self, rank: int, answer: dict[str, Any]) -> Layout:
        orders = []
        for start, column in zip(answer["starts"], answer["column_of"], strict=True):
            key = tuple(answer["columns"][column])
            if key not in self._orders:
                self._orders[key] = self._order(key, f"element {start} of rank {rank}")
            orders.append(self._orders[key])
        return Layout(tuple(answer["starts"]), tuple(orders))

    def _order(self, results: Sequence[float], where: str) -> Order:
        world, unit = self.case.world, self.numbers.unit
        if results[0] != world * unit:
            raise InvalidUsage(
                f"reveal: this is no {self.case.collective} by sum: {world} ranks added {unit:g} each, and {where} "
                f"became {results[0]:g} instead of {world * unit:g}"
            )
        sizes = {}
        for pair, result in zip(self._pairs, results[1:], strict=True):
            later = result / unit
            if not 0 <= later <= world - 2 or later != int(later):
                raise InvalidUsage(
                    f"reveal: ranks {pair[0]} and {pair[1]} added {self.numbers.big:g} and its opposite, the others "
                    f"{unit:g}, and {where} became {result:g}: one of them is missing there, or counts twice"
                )
            sizes[pair] = world - int(later)
        if world > 2 and set(sizes.values()) == {2}:
            return Order("exact: whatever the order, nothing was lost", 1, is_tree=False)
        try:
            return self._of_tree(tree_of(sizes, (1 << world) - 1), ())
        except NotATreeError as error:
            return Order(f"not a tree: {error}", 0, is_tree=False)

    def _of_tree(self, node: Node, wide: Sequence[int]) -> Order:
        number, program = number_in(self._trees, node, wide), as_program(node, wide)
        text, depth = self._trees.text(number), self._trees.depth[number]
        return Order(text, depth, is_widened=bool(wide), node=node, program=program)

    def _with_roundings(self, count: int, layouts: tuple[Layout, ...], place: dict[str, Any]) -> tuple[Layout, ...]:
        """The same with the sums that are not rounded to the dtype; not asked for if ranks differ."""
        layout = layouts[0]
        sums = [list(inner_sums(order.node)) if order.is_tree else [] for order in layout.orders]
        calls = [
            list(
                map(list, zip(*(self._rounding_values(own[k] if k < len(own) else None) for own in sums), strict=True))
            )
            for k in range(max(map(len, sums)))
        ]
        if len(layouts) > 1 or not calls:
            return layouts
        answers = self._do("constants", count, place, starts=list(layout.starts), values=calls)
        runs = []
        # Elements with one tree may differ in its roundings.
        for start in sorted({*layout.starts, *(start for answer in answers for start in answer["starts"])}):
            order = layout.order_of(start)
            inner = inner_sums(order.node) if order.is_tree else ()
            results = _results_at(answers, start)
            wide = [ranks for (ranks, _), result in zip(inner, results, strict=False) if result != 0]
            runs.append((start, self._of_tree(order.node, wide) if wide else order))
        return (_joined(runs),)

    def _rounding_values(self, inner: tuple[int, int] | None) -> list[float]:
        """What each rank adds: a large number and units in the inner sum, and its opposite in the sum's neighbour."""
        values = [0.0] * self.case.world
        if inner:
            ranks, neighbour = map(ranks_in, inner)
            for rank in ranks[1:]:
                values[rank] = self.numbers.unit
            values[ranks[0]] = self.numbers.just_large(self.case.world)
            values[neighbour[0]] = -values[ranks[0]]
        return values

    def _with_random(self, seen: Seen, calls: int, place: dict[str, Any]) -> Seen:
        each = [*seen.layouts] if len(seen.layouts) > 1 else [seen.layout] * self.case.world
        if self.case.collective == "reduce_scatter":
            each = [_block(seen.layout, rank * seen.count, seen.count) for rank in range(self.case.world)]
        programs = [[order.program for order in layout.orders] for layout in each]
        answers = self._do(
            "random", seen.count, place, seed=seen.count, calls=calls, starts=[one.starts for one in each],
            trees=[None if None in own else own for own in programs],
        )  # fmt: skip
        holders = [answer for answer in answers if answer["elements"]]
        differ = ["calls"] * any(len(set(answer["digests"])) > 1 for answer in holders)
        if self.case.collective == "all_reduce":
            differ += ["ranks"] * (len({answer["digests"][0] for answer in holders}) > 1)
        compared = [answer["wrong"] for answer in holders if answer["wrong"] is not None]
        widest = next((answer["accumulator"] for answer in holders if answer["accumulator"]), "")
        wrong = sum(compared) if compared else None
        return replace(seen, bits_differ=tuple(differ), wrong=wrong, accumulator=widest)

    def _do(self, command: str, count: int, place: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        whole = count * (self.case.world if self.case.collective == "reduce_scatter" else 1)
        case = replace(self.case, count=count, bytes=whole * ITEM_BYTES[self.case.dtype])
        answers = self._ask({"do": command, "case": vars(case), **place, **more})
        refused = next((answer["refused"] for answer in answers if "refused" in answer), None)
        if refused:
            raise InvalidUsage(f"reveal: {refused}")
        return answers


def numbers_of(case: Case) -> Numbers:
    """The probe of the case. InvalidUsage if there is none."""
    if case.collective not in REVEALED:
        raise InvalidUsage(f"reveal: {case.collective} adds nothing: pass one of {', '.join(REVEALED)}")
    if case.dtype not in NUMBERS:
        exact = "int" in case.dtype or case.dtype == "bool"
        why = "is added to the same bits in any order" if exact else "has no numbers far enough apart"
        raise InvalidUsage(f"reveal: {case.dtype} {why}: pass one of {', '.join(NUMBERS)}")
    numbers = NUMBERS[case.dtype]
    if not 2 <= case.world <= numbers.most_ranks:
        why = "one rank adds nothing" if case.world < 2 else f"a sum of {case.dtype} counts no more"
        raise InvalidUsage(f"reveal: takes 2 to {numbers.most_ranks} ranks, got {case.world}: {why}")
    return numbers


def _results_at(answers: list[dict[str, Any]], element: int) -> list[float]:
    """The results of all calls at an element of the message, from the last rank that has it."""
    for answer in reversed(answers):
        run = bisect.bisect(answer["starts"], element) - 1
        if run >= 0:
            return answer["columns"][answer["column_of"][run]]
    raise ValueError(f"no rank has element {element}")


def _joined(runs: list[tuple[int, Order]]) -> Layout:
    """Runs of (first element, order), with neighbours of one order as one."""
    kept = [run for k, run in enumerate(runs) if k == 0 or run[1] != runs[k - 1][1]]
    return Layout(tuple(start for start, _ in kept), tuple(order for _, order in kept))


def _block(layout: Layout, first: int, count: int) -> Layout:
    """The part of the message from element `first` on."""
    inside = [start for start in layout.starts if first < start < first + count]
    starts = [first, *inside] if count else []
    return Layout(tuple(starts), tuple(map(layout.order_of, starts)))
