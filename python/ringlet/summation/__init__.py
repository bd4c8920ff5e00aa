"""The summation order of anybody's all-reduce, reduce or reduce-scatter, seen from outside (docs/reveal.md).

`counts` makes a tree of counts, `probe` sees one message, `report` compares messages. The ranks' half, which needs no
torch, is bench/ranks/probe.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringlet.agreement import all_gather_texts
from ringlet.bench.ranks.case import Case
from ringlet.bench.ranks.probe import Prober
from ringlet.bench.ranks.torch_ranks import Function
from ringlet.collectives import AnyGroup
from ringlet.errors import InvalidUsage
from ringlet.group import group_from, has_default
from ringlet.summation.report import Revealed, reveal_call

SIZES = (1, 5, 1000, 99_999)


def reveal(
    function: Callable[..., Any],
    group: AnyGroup | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    dtype: torch.dtype = torch.float32,
    collective: str = "all_reduce",
    calls: int = 2,
    device: str = "cpu",
) -> Revealed:
    """Shows in which order `function` sums over the ranks: its tree of additions for every element, at all sizes.

    function: `function(tensor)` sums a one-dimensional tensor over the group's ranks, in place or giving the result;
    for "reduce" the result is rank 0's; for "reduce_scatter" it is `function(output, input)`.
    group: over which the ranks tell each other what they saw; by default ringlet's, or torch.distributed's.
    sizes: elements of the messages (of reduce_scatter: of a rank's block); between them it looks for the sizes at which
    the order changes. calls: how often it probes each message, and compares. device: of the tensors.

    Every rank of the group calls it. All get the same result, with `orders`, `messages`, `depends` and `text()`.
    InvalidUsage: `function` does not sum, the dtype is not float16, bfloat16, float32 or float64, or there is one rank.
    Source: FPRev (arXiv 2411.00442) for sums of arrays.
    """
    rank, world, gather = _members(group)
    name = str(dtype).removeprefix("torch.")
    case = Case(collective, "auto", "ordinary", "api", world, 0, 0, name, "sum")
    if not callable(function):
        raise InvalidUsage(f"reveal: pass a function of a tensor, got {function!r:.60}")
    if not sizes or min(sizes) < 1 or calls < 1:
        raise InvalidUsage(f"reveal: sizes and calls must be at least 1, got {list(sizes)} and {calls}")
    library = Function(rank, world, device, function)
    prober = Prober(library)

    def ask(command: dict[str, Any]) -> list[dict[str, Any]]:
        answer = prober.random(command) if command["do"] == "random" else prober.constants(command)
        return [json.loads(text) for text in gather(json.dumps(answer))]

    target = getattr(function, "__name__", type(function).__name__)
    return reveal_call(ask, case, sizes, target=target, version=library.version, calls=calls)


def assert_one_order(function: Callable[..., Any], group: AnyGroup | None = None, **options: Any) -> None:
    """AssertionError if a sum's bits depend on anything but the ranks' numbers: on rank, call, place, size or memory.

    Every rank of the group calls it. options: as of `reveal`.
    """
    found = reveal(function, group, **options)
    assert not found.depends, f"{found.target} has more than one summation order\n{found.text()}"


def assert_same_order(
    function: Callable[..., Any],
    other: Callable[..., Any],
    group: AnyGroup | None = None,
    **options: Any,
) -> None:
    """AssertionError if two functions sum some element in different orders. Every rank of the group calls it.

    options: as of `reveal`.
    """
    found, others = reveal(function, group, **options), reveal(other, group, **options)
    for seen, beside in zip(found.messages, others.messages, strict=True):
        for element in sorted({*seen.layout.starts, *beside.layout.starts}):
            one, two = seen.layout.order_of(element), beside.layout.order_of(element)
            where = f"element {element:,} of {seen.count:,}"
            assert one == two, f"{where} is {one.text} by {found.target}, and {two.text} by {others.target}"


def _members(group: AnyGroup | None) -> tuple[int, int, Callable[[str], list[str]]]:
    """(rank, world, a function that gives every rank the texts of all)."""
    if isinstance(group, dist.ProcessGroup) or (group is None and not has_default() and dist.is_initialized()):
        world = dist.get_world_size(group)

        def gather(text: str) -> list[str]:
            texts: list[str] = [""] * world
            dist.all_gather_object(texts, text, group)
            return texts

        return dist.get_rank(group), world, gather
    ours = group_from(group, "reveal")
    return ours.rank, ours.world, functools.partial(all_gather_texts, ours.handle)
