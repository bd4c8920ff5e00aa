"""What an element's summation order depends on: messages of many sizes, and what one message tells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringlet.bench.ranks.case import ITEM_BYTES, Case
from ringlet.errors import InvalidUsage
from ringlet.schedule.draw_trees import letter
from ringlet.summation.probe import Ask, Layout, Order, Probe, Seen

MOST_CHANGES = 16  # sizes at which the order changes that are looked for
TOPICS = ("the rank", "the call", "the element's place", "the message's size", "the numbers")
ASIDE = 4096  # elements, at most, of the messages that are probed at another place


@dataclass(frozen=True)
class Change:
    """At `count` elements the orders are others than at one element less."""

    count: int
    before: tuple[Order, ...]
    after: tuple[Order, ...]


@dataclass
class Revealed:
    """The summation orders of one library's call. `depends`: what an element's bits depend on, in words, by topic;
    `independent`: topics that were tried and do not matter."""

    target: str
    version: str
    case: Case
    digits: int
    messages: list[Seen]
    changes: list[Change] = field(default_factory=list)
    depends: dict[str, str] = field(default_factory=dict)
    independent: list[str] = field(default_factory=list)

    @property
    def orders(self) -> list[Order]:
        """All distinct orders, in the order of their appearance."""
        found = [order for seen in self.messages for layout in seen.layouts for order in layout.orders]
        return list(dict.fromkeys([*found, *(o for change in self.changes for o in (*change.before, *change.after))]))

    def text(self) -> str:
        """For a terminal."""
        case = self.case
        rows: list[tuple[str, ...]] = [("elements", "orders", "segments", "ranks", "roundings")]
        for cells, group in itertools.groupby(self.messages, self._cells):
            sizes = [f"{seen.count:,}" for seen in group]
            rows.append((sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}", *cells))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.target} ({self.version}): {case.collective} of {case.dtype}, {case.world} ranks"]
        lines += ["  " + "  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
        lines += [f"  {self.names([order])} = {order.text}" for order in self.orders]
        lines += [f"  depends on {topic}: {words}" for topic, words in self.depends.items()]
        if self.independent:
            lines.append(f"  does not depend on {', '.join(self.independent)}")
        return "\n".join([*lines, f"  {self.error_bound()}", ""])

    def _cells(self, seen: Seen) -> tuple[str, ...]:
        """A message's line in the table."""
        equal = len(seen.layouts) == 1 and "ranks" not in seen.bits_differ
        known = all(order.is_tree for order in seen.layout.orders)
        depth = str(max(order.depth for order in seen.layout.orders)) if known else "unknown"
        segments = len(seen.layout.starts)
        orders = [order for layout in seen.layouts for order in layout.orders]
        return self.names(orders), f"{segments:,}", "equal" if equal else "differ", depth

    def error_bound(self) -> str:
        """In words."""
        orders = [order for seen in self.messages for layout in seen.layouts for order in layout.orders]
        if not all(order.is_tree for order in orders):
            return "error: no bound is known, because an order is no tree"
        wide = {seen.accumulator for seen in self.messages if any(order.is_widened for order in seen.layout.orders)}
        beside = f", and what {' and '.join(sorted(wide))} rounds" if wide - {""} else ""
        depth = max(order.depth for order in orders)
        return f"error: at most {depth} x 2^-{self.digits} of the sum of the magnitudes, to first order{beside}"

    def names(self, orders: Iterable[Order]) -> str:
        """ "A B" """
        every = self.orders
        letters = list(map(letter, sorted({every.index(order) for order in orders})))
        return " ".join(letters[:8]) + (f" and {len(letters) - 8} more" if len(letters) > 8 else "")

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        numbers = {order: k for k, order in enumerate(self.orders)}
        return {
            "target": self.target,
            "version": self.version,
            **{key: getattr(self.case, key) for key in ("collective", "world", "dtype", "memory")},
            "orders": [{"text": o.text, "depth": o.depth, "is_tree": o.is_tree} for o in numbers],
            "messages": [
                {
                    "elements": seen.count,
                    "ranks_equal": len(seen.layouts) == 1 and "ranks" not in seen.bits_differ,
                    "layouts": [
                        {"starts": list(layout.starts), "orders": [numbers[order] for order in layout.orders]}
                        for layout in seen.layouts
                    ],
                }
                for seen in self.messages
            ],
            "changes": [
                {"elements": change.count, "orders": [numbers[order] for order in change.after]}
                for change in self.changes
            ],
            "depends": self.depends,
            "independent": self.independent,
            "error_bound": self.error_bound(),
        }


def reveal_call(
    ask: Ask, case: Case, sizes: Sequence[int], *, target: str = "", version: str = "", calls: int = 2
) -> Revealed:
    """Probes messages of all sizes, `calls` times each, and the sizes between at which the order changes. Collective.

    InvalidUsage if the call does not sum.
    """
    probe = Probe(ask, case)
    messages = [probe.see(count, sweeps=calls) for count in sorted(set(sizes))]
    found = Revealed(target, version, case, probe.numbers.digits, messages)
    ends = [(seen.count, seen.layout.distinct) for seen in messages]
    for low, high in itertools.pairwise(ends):
        found.changes += _changes(probe, low, high, MOST_CHANGES - len(found.changes))
    _conclude(found)
    _move(found, probe)
    return found


def _changes(
    probe: Probe, low: tuple[int, tuple[Order, ...]], high: tuple[int, tuple[Order, ...]], most: int
) -> list[Change]:
    """By bisection, to the element. Between two sizes with the same orders it does not look."""
    if low[1] == high[1] or most <= 0:
        return []
    if high[0] - low[0] == 1:
        return [Change(high[0], low[1], high[1])]
    count = (low[0] + high[0]) // 2
    middle = (count, probe.orders(count))
    first = _changes(probe, low, middle, most)
    return first + _changes(probe, middle, high, most - len(first))


def _conclude(found: Revealed) -> None:
    """What the messages say of all topics but the place in memory."""
    said: dict[str, str] = {}
    for topic, words in _topics(found):
        said.setdefault(topic, words)
    found.depends |= {topic: said[topic] for topic in TOPICS if topic in said}
    untried = set() if len(found.messages) > 1 else {"the message's size"}
    untried |= set() if any(seen.wrong is not None for seen in found.messages) else {"the numbers"}
    found.independent += [topic for topic in TOPICS if topic not in {*said, *untried}]


def _topics(found: Revealed) -> Iterator[tuple[str, str]]:
    """What an element's bits depend on, in words, after its topic; the first of a topic tells enough."""
    for seen in found.messages:
        at = f"at {seen.count:,} elements"
        for rank, layout in enumerate(seen.layouts):
            if difference := _difference(layout, seen.layout):
                element, here, other = difference
                where = f"element {element:,} of {seen.count:,}"
                yield "the rank", f"{where} is {other.text} on rank 0 and {here.text} on rank {rank}"
        if "ranks" in seen.bits_differ:
            yield "the rank", f"random numbers give other bits on some ranks, {at}"
        if seen.sweeps_differ:
            yield "the call", f"calls with {seen.count:,} elements add in other orders than the calls before"
        if "calls" in seen.bits_differ:
            yield "the call", f"the same random numbers give other bits from call to call, {at}"
        if seen.wrong and not seen.bits_differ and not seen.sweeps_differ:
            yield (
                "the numbers",
                (
                    f"{seen.wrong:,} sums of random numbers, {at}, are not those of the tree: the call adds ordinary "
                    "numbers in another order than the probe's, which differ by many powers of two"
                ),
            )
    most = max(found.messages, key=lambda seen: (len(seen.layout.distinct), seen.count))
    if len(most.layout.distinct) > 1:
        starts = ", ".join(f"{start:,}" for start in most.layout.starts[1:4])
        more = ", ..." if len(most.layout.starts) > 4 else ""
        several = f"{len(most.layout.distinct)} orders in {most.count:,} elements"
        yield "the element's place", f"{several}, another from element {starts}{more} on"
    if found.changes:
        changes = [
            f"at {change.count:,} elements from {found.names(change.before)} to {found.names(change.after)}"
            for change in found.changes
        ]
        yield "the message's size", "; ".join([*changes, *["and perhaps more"] * (len(changes) >= MOST_CHANGES)])
    for seen, longer in itertools.pairwise(found.messages):  # of the same orders, at other elements
        if difference := _difference(longer.layout, seen.layout, seen.count):
            element, there, here = difference
            where = f"element {element:,} of {seen.count:,}"
            yield "the message's size", f"{where} is {here.text}, and of {longer.count:,} {there.text}"


def _difference(layout: Layout, other: Layout, end: float = math.inf) -> tuple[int, Order, Order] | None:
    """The first element, before `end`, whose orders differ, and these."""
    for element in sorted({*layout.starts, *other.starts}):
        if element < end and layout.order_of(element) != other.order_of(element):
            return element, layout.order_of(element), other.order_of(element)
    return None


def _move(found: Revealed, probe: Probe) -> None:
    """Probes a message at other places in memory."""
    count = max((seen.count for seen in found.messages if seen.count <= ASIDE), default=found.messages[0].count)
    here = next(seen for seen in found.messages if seen.count == count)
    places: dict[str, dict[str, Any]] = {"the memory's alignment": {"offset": 1}}
    if found.case.collective == "all_reduce":
        places["in place or not"] = {"in_place": False}
    for topic, place in places.items():
        try:
            there = probe.see(count, sweeps=1, **place)
        except InvalidUsage:  # the library has no such call
            continue
        if difference := _difference(there.layout, here.layout):
            element, moved, before = difference
            how = f"{ITEM_BYTES[found.case.dtype]} bytes further" if "offset" in place else "into another buffer"
            found.depends[topic] = f"element {element:,} of {count:,} is {before.text}, and {moved.text} {how}"
        else:
            found.independent.append(topic)
