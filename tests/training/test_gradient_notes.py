"""Hooks that note gradients without Python, in a reducer (GradientArrivals)."""

import gc

import pytest
import torch

from ranks import on
from reducer_checks import assert_step, data, mlp
from refusals import refused
from ringlet import GradientReducer
from ringlet.training.gradient_hooks import owner_of


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
    assert_step(model, rank, world)
    buckets = len(reducer.stats()["bucket_bytes"])
    assert buckets > 1
    assert len(calls) == (buckets if overlaps else 0)
    assert reducer.stats()["ready_s"] == sorted(reducer.stats()["ready_s"])
    parameter = next(model.parameters())
    assert owner_of(parameter) is reducer

    def exchange(exchanged: torch.Tensor) -> None:
        exchanged.grad = exchanged.grad.clone()

    handle = parameter.register_post_accumulate_grad_hook(exchange)
    assert_step(model, rank, world, 1)
    handle.remove()
    layer = model[0]
    del reducer, model, parameter
    gc.collect()
    refused(r"of shape \[.*its GradientReducer or Zero is gone", lambda: layer(data(rank)).sum().backward())
