"""Collectives inside autograd's graph, against one process that computes what all ranks do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

import ringlet
from ranks import on
from refusals import refused

ROOT = 1


@dataclass(frozen=True)
class Case:
    """`call(rank, world, x)` is made by each rank on its own x; `wanted(xs)` is what all of them get."""

    count: Callable[[int, int], int]  # elements of x, by rank and world
    call: Callable[[int, int, Tensor], Tensor]
    wanted: Callable[[list[Tensor]], list[Tensor]]


def scale(rank: int) -> float:
    return rank + 0.5


def uneven(world: int) -> list[int]:
    return [q + 1 for q in range(world)]


def reduced(op: str) -> Callable[[list[Tensor]], Tensor]:
    def total(xs: list[Tensor]) -> Tensor:
        if op == "premul_sum":
            return sum(x * scale(q) for q, x in enumerate(xs))  # type: ignore[return-value]
        return sum(xs) / (len(xs) if op == "avg" else 1)  # type: ignore[return-value]

    return total


def in_place(call: Callable[..., object]) -> Callable[[int, int, Tensor], Tensor]:
    """On a copy, whose history the call becomes a part of."""

    def made(rank: int, world: int, x: Tensor) -> Tensor:
        y = x * 3
        call(rank, world, y)
        return y

    return made


def tripled(wanted: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda xs: wanted([3 * x for x in xs])


def all_to_all_lists(rank: int, world: int, x: Tensor) -> Tensor:
    blocks = [torch.empty(rank + q + 1, dtype=x.dtype) for q in range(world)]
    ringlet.all_to_all(blocks, list(x.split([rank + q + 1 for q in range(world)])))
    return torch.cat(blocks)


def all_gather_lists(rank: int, world: int, x: Tensor) -> Tensor:
    blocks = [torch.empty(count, dtype=x.dtype) for count in uneven(world)]
    ringlet.all_gather(blocks, x)
    return torch.cat(blocks)


def scattered(rank: int, world: int, x: Tensor) -> Tensor:
    output = x[:2] * 1  # of the others' graph too: their backward is a call as well
    return ringlet.scatter(output, x if rank == ROOT else None, ROOT)


def columns_reduced(xs: list[Tensor]) -> list[Tensor]:
    total = sum(x.view(4, 2)[:, 0] for x in xs)
    return [torch.stack((total, x.view(4, 2)[:, 1]), 1).view(-1) for x in xs]  # type: ignore[arg-type]


def everyone(y: Tensor, world: int) -> list[Tensor]:
    return [y] * world


CASES = {
    **{
        f"all_reduce {op}": Case(
            lambda r, w: 5,
            in_place(lambda r, w, y, op=op: ringlet.all_reduce(y, op, scale=scale(r))),
            tripled(lambda xs, op=op: everyone(reduced(op)(xs), len(xs))),
        )
        for op in ("sum", "avg", "premul_sum")
    },
    "all_reduce plain": Case(
        lambda r, w: 5, in_place(lambda r, w, y: ringlet.all_reduce(y)), tripled(lambda xs: everyone(sum(xs), len(xs)))
    ),
    "all_reduce into output": Case(
        lambda r, w: 5,
        lambda r, w, x: ringlet.all_reduce(x, output=torch.empty_like(x)),
        lambda xs: everyone(sum(xs), len(xs)),
    ),
    "all_reduce of columns": Case(
        lambda r, w: 8,
        in_place(lambda r, w, y: ringlet.ring_allreduce(y.view(4, 2)[:, 0])),
        tripled(columns_reduced),
    ),
    **{
        f"reduce {op}": Case(
            lambda r, w: 3,
            in_place(lambda r, w, y, op=op: ringlet.reduce(y, ROOT, op, scale=scale(r))),
            tripled(lambda xs, op=op: [reduced(op)(xs) if q == ROOT else x for q, x in enumerate(xs)]),
        )
        for op in ("sum", "avg", "premul_sum")
    },
    "broadcast": Case(
        lambda r, w: 3,
        in_place(lambda r, w, y: ringlet.broadcast(y, ROOT)),
        tripled(lambda xs: everyone(xs[ROOT], len(xs))),
    ),
    **{
        f"reduce_scatter {op}": Case(
            lambda r, w: 2 * w,
            lambda r, w, x, op=op: ringlet.reduce_scatter(x.new_empty(2), x, op, scale=scale(r)),
            lambda xs, op=op: list(reduced(op)(xs).split(2)),
        )
        for op in ("sum", "avg", "premul_sum")
    },
    "reduce_scatter lists": Case(
        lambda r, w: sum(uneven(w)),
        lambda r, w, x: ringlet.reduce_scatter(x.new_empty(r + 1), list((1 * x).split(uneven(w)))),
        lambda xs: list(sum(xs).split(uneven(len(xs)))),  # type: ignore[attr-defined]
    ),
    "all_gather": Case(
        lambda r, w: 2,
        lambda r, w, x: ringlet.all_gather(x.new_empty(2 * w), x),
        lambda xs: everyone(torch.cat(xs), len(xs)),
    ),
    "all_gather lists": Case(lambda r, w: r + 1, all_gather_lists, lambda xs: everyone(torch.cat(xs), len(xs))),
    "scatter": Case(lambda r, w: 2 * w, scattered, lambda xs: list(xs[ROOT].split(2))),
    "all_to_all": Case(
        lambda r, w: 2 * w,
        lambda r, w, x: ringlet.all_to_all(torch.empty_like(x), x),
        lambda xs: [torch.cat([x[2 * q : 2 * q + 2] for x in xs]) for q in range(len(xs))],
    ),
    "all_to_all lists": Case(
        lambda r, w: sum(r + q + 1 for q in range(w)),
        all_to_all_lists,
        lambda xs: [
            torch.cat([x.split([p + k + 1 for k in range(len(xs))])[q] for p, x in enumerate(xs)])
            for q in range(len(xs))
        ],
    ),
}


def input_of(case: Case, rank: int, world: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(case.count(rank, world), dtype=torch.float64, generator=generator).requires_grad_()


def weights(y: Tensor, rank: int) -> Tensor:
    return torch.linspace(1, 2 + rank, y.numel(), dtype=y.dtype)


@on((2, 3), "shared_memory", "threads")
def test_gradients(rank: int, world: int) -> None:
    wrong = []
    for name, case in CASES.items():
        x = input_of(case, rank, world)
        y = case.call(rank, world, x)
        assert y.grad_fn is not None, name
        (y.square() * weights(y, rank)).sum().backward()

        xs = [input_of(case, q, world) for q in range(world)]
        ys = case.wanted(xs)
        loss = sum((one.square() * weights(one, q)).sum() for q, one in enumerate(ys))
        wanted = torch.autograd.grad(loss, xs, allow_unused=True)[rank]  # type: ignore[arg-type]
        wanted = torch.zeros_like(x) if wanted is None else wanted
        got = torch.zeros_like(x) if x.grad is None else x.grad
        if not torch.allclose(y, ys[rank]) or not torch.allclose(got, wanted):
            wrong.append(f"{name}: {y.tolist()}, wanted {ys[rank].tolist()}; {got.tolist()}, wanted {wanted.tolist()}")
    assert not wrong, "\n".join(wrong)


@on((2, 3), "shared_memory", "threads")
def test_gradients_of_gradients(rank: int, world: int) -> None:
    """A gradient's own gradient."""
    x = torch.arange(3.0, dtype=torch.float64).add(rank).requires_grad_()
    y = ringlet.all_reduce(x.square())
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    first.square().sum().backward()

    xs = [torch.arange(3.0, dtype=torch.float64).add(q).requires_grad_() for q in range(world)]
    total = sum(one.square() for one in xs)
    firsts = torch.autograd.grad(world * total.square().sum(), xs, create_graph=True)
    wanted = torch.autograd.grad(sum(one.square().sum() for one in firsts), xs)
    assert torch.allclose(first, firsts[rank]) and torch.allclose(x.grad, wanted[rank])


@on(2)
def test_what_cannot_be_differentiated_is_refused(rank: int, world: int) -> None:
    leaf = torch.ones(4, requires_grad=True)
    used = leaf * 1
    several = list((leaf * 1).unbind())
    one = torch.empty(1)
    calls = {
        "a leaf Variable that requires grad is being used in an in-place operation": lambda: ringlet.all_reduce(leaf),
        "a view of a leaf Variable": lambda: ringlet.broadcast(leaf[:2]),
        "function that returns multiple views": lambda: ringlet.all_gather(several[:world], one[0]),
        "output tensors must not overlap": lambda: ringlet.all_gather([one] * world, leaf[:1]),
        "all_reduce: not differentiable with async_op=True": lambda: ringlet.all_reduce(used, async_op=True),
        "all_reduce: max is not differentiable, only sum, avg, premul_sum": lambda: ringlet.all_reduce(used, "max"),
        "gather: not differentiable": lambda: ringlet.gather(torch.empty(4 * world) if rank == 0 else None, used),
        "recv: the given tensor must not be the result of an operation that autograd records": lambda: ringlet.recv(
            used, 1 - rank
        ),
    }
    for said, call in calls.items():
        refused(said, call)
    with torch.no_grad():
        ringlet.all_reduce(leaf)
        ringlet.all_reduce(used, "max", async_op=True).wait()
    assert leaf.tolist() == [world] * 4 and leaf.requires_grad and used.tolist() == [1] * 4
    assert ringlet.all_reduce(torch.ones(2)).grad_fn is None


@on(2)
def test_tensors_with_a_tangent_are_refused(rank: int, world: int) -> None:
    with forward_ad.dual_level():
        plain = forward_ad.make_dual(torch.ones(4), torch.ones(4))
        used = forward_ad.make_dual(torch.ones(4, requires_grad=True), torch.ones(4)) * 1
        for dual in (plain, used):
            for call in (
                lambda dual=dual: ringlet.all_reduce(dual),
                lambda dual=dual: ringlet.broadcast(dual, 0),
                lambda dual=dual: ringlet.all_gather(torch.empty(4 * world), dual),
            ):
                refused(r"has a tangent of forward-mode .* pass \.detach", call)
        assert ringlet.all_reduce(used.detach().clone()).tolist() == [world] * 4
