"""Hooks that note gradients without Python (GradientArrivals): when they do, and when they leave a gradient to it."""

import gc

import pytest
import torch
from torch import nn

from ranks import on
from reducer_checks import assert_gradients, data, expected_average, loss_of, mlp
from ringlet import GradientReducer, InvalidUsage
from ringlet.training.gradient_hooks import GradientArrivals, own_memory, owner_of


def in_backward(arrivals: GradientArrivals, missing: list[int], parameters: list[nn.Parameter]) -> list[int]:
    """A backward in which `arrivals` is armed. Returns the parameters whose gradients were left to Python, in order."""
    left: list[int] = []
    handles = [
        p.register_post_accumulate_grad_hook(arrivals.hook(i, lambda _p, i=i: left.append(i)))
        for i, p in enumerate(parameters)
    ]
    loss = sum(p.sum() for p in parameters)
    loss.register_hook(lambda _gradient: arrivals.arm(missing, []))
    loss.backward()
    for handle in handles:
        handle.remove()
    return left


def fresh(*shapes: tuple[int, ...]) -> tuple[GradientArrivals, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    arrivals = GradientArrivals([torch.empty(shape, device="meta") for shape in shapes], own_memory())
    arrivals.place([(0, 0)] * len(shapes))
    return arrivals, parameters


def test_all_but_the_last_of_a_bucket_are_noted():
    arrivals, parameters = fresh((2,), (3, 2), (4,))
    left = in_backward(arrivals, [3], parameters)
    indices, times, gradients = arrivals.take()
    assert len(left) == 1 and sorted([*indices, *left]) == [0, 1, 2]
    assert times == sorted(times)
    assert all(gradient is parameters[index].grad for index, gradient in zip(indices, gradients, strict=True))
    assert arrivals.take() == ([], [], [])


def test_a_bucket_that_waits_for_the_end_is_noted_whole():
    arrivals, parameters = fresh((2,), (3,))
    assert in_backward(arrivals, [3], parameters) == []
    assert sorted(arrivals.take()[0]) == [0, 1]


def test_what_is_left_to_python():
    arrivals, parameters = fresh((2,), (3,), (4,))
    arrivals.place([(0, 0), (1, 0), (1, 0)])
    assert in_backward(arrivals, [0, 9], parameters).count(0) == 1  # of a bucket that is not reduced in place
    arrivals.disarm()
    arrivals = GradientArrivals([torch.empty(n, device="meta") for n in (2, 5, 4)], own_memory())
    arrivals.place([(0, 0)] * 3)
    assert in_backward(arrivals, [9], parameters) == [1]  # of another shape
    assert not arrivals.disarm() and not arrivals.armed
    assert arrivals.take()[0] == []
    at = parameters[2].grad.data_ptr()
    arrivals.place([(0, 0), (0, 0), (0, at)])  # that lies in the bucket's buffer
    assert 2 in in_backward(arrivals, [9], parameters)


def test_a_backward_that_is_not_the_armed_one():
    arrivals, parameters = fresh((2,), (3,))
    in_backward(arrivals, [9], parameters)
    left = []
    parameters[0].register_post_accumulate_grad_hook(arrivals.hook(0, lambda _p: left.append(0)))
    parameters[0].sum().backward()  # armed, and over
    assert left == [0] and 0 in arrivals.take()[0]


def test_wrong_numbers_are_refused():
    arrivals, _ = fresh((2,), (3,))
    with pytest.raises(InvalidUsage, match="place: one bucket"):
        arrivals.place([(0, 0)])
    with pytest.raises(InvalidUsage, match="arm: one number"):
        arrivals.arm([], [])


@on("two")
@pytest.mark.parametrize("overlaps", [True, False])
def test_in_a_reducer(rank: int, world: int, overlaps: bool) -> None:
    """Python runs for no gradient but those that fill a bucket; a gradient that a hook exchanges is averaged all the
    same; a hook does not keep its reducer."""
    calls = []

    class Counted(GradientReducer):
        def _take(self, index: int) -> None:
            calls.append(index)
            super()._take(index)

    model = mlp()
    reducer = Counted(model, bucket_mb=1e-4, first_bucket_mb=1e-4)
    reducer._channel.overlaps = lambda _device: overlaps  # whatever this machine's processors are
    loss_of(model, rank).backward()
    assert_gradients(model, expected_average(model, world))
    buckets = len(reducer.stats()["bucket_bytes"])
    assert buckets > 1
    assert len(calls) == (buckets if overlaps else 0)
    assert reducer.stats()["ready_s"] == sorted(reducer.stats()["ready_s"])
    parameter = next(model.parameters())
    assert owner_of(parameter) is reducer

    def exchange(exchanged: torch.Tensor) -> None:
        exchanged.grad = exchanged.grad.clone()

    handle = parameter.register_post_accumulate_grad_hook(exchange)
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    assert_gradients(model, expected_average(model, world, (1,)))
    handle.remove()
    layer = model[0]
    del reducer, model, parameter
    gc.collect()
    with pytest.raises(InvalidUsage, match="its GradientReducer or Zero is gone"):
        layer(data(rank)).sum().backward()
