"""torch.compile of modules that a reducer or a Zero trains: the hooks communicate outside the graphs."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ringlet
from ranks import on
from zero_checks import LIMITS, batch, loss_of, make, train_alone

STEPS = 4
SMALL = {"bucket_mb": 0.002, "first_bucket_mb": 0.001}


def whole_before(model: nn.Module, build) -> tuple[nn.Module, object]:
    compiled = torch.compile(model, backend="aot_eager")
    return compiled, build(compiled)


def whole_after(model: nn.Module, build) -> tuple[nn.Module, object]:
    built = build(model)
    return torch.compile(model, backend="aot_eager"), built


def in_place(model: nn.Module, build) -> tuple[nn.Module, object]:
    model.compile(backend="aot_eager")
    return model, build(model)


def in_blocks(model: nn.Module, build) -> tuple[nn.Module, object]:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model, build(model)


WAYS = [whole_before, whole_after, in_place, in_blocks]


def train(called: nn.Module, rank: int, step) -> None:
    for number in range(STEPS):
        if number % 2:
            with torch.no_grad():
                loss_of(called, *batch(100, rank))
        loss_of(called, *batch(number, rank)).backward()
        step()


def compare(model: nn.Module, parameters) -> None:
    for (name, expected), found in zip(model.named_parameters(), parameters, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text)


@contextlib.contextmanager
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # a hook that were traced would be traced again and again
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@on(2, "dist:ringlet")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@fresh_graphs()
def test_a_reducer_of_a_compiled_module(rank, world, way):
    model = make()
    alone = copy.deepcopy(model)
    called, reducer = way(model, lambda module: ringlet.GradientReducer(module, **SMALL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    train(called, rank, step)
    train_alone(alone, world, STEPS, lr=1e-2)
    compare(alone, model.parameters())
    assert reducer.stats()["backwards"] == STEPS and graphs() > 0


@on(2, "dist:ringlet")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("stage", [1, 2, 3])
@fresh_graphs()
def test_zero_of_a_compiled_module(rank, world, way, stage):
    model = make()
    alone = copy.deepcopy(model)
    called, zero = way(model, lambda module: ringlet.Zero(module, torch.optim.AdamW, stage, lr=1e-2, **LIMITS))
    train(called, rank, zero.step)
    train_alone(alone, world, STEPS, lr=1e-2)
    with zero.gathered():
        compare(alone, model.parameters())
    assert zero.steps == STEPS and graphs() > 0


@on(2, "dist:ringlet")
@pytest.mark.parametrize("way", ["reducer", 1, 3])
@fresh_graphs()
def test_a_compiled_training_step(rank, world, way):
    """Backward, hooks and update run inside the compiled function, between its graphs."""
    model = make()
    alone = copy.deepcopy(model)
    if way == "reducer":
        ringlet.GradientReducer(model, **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    else:
        zero = ringlet.Zero(model, torch.optim.SGD, way, lr=1e-2, **LIMITS)

    @torch.compile(backend="aot_eager")
    def step(*given):
        loss_of(model, *given).backward()
        if way == "reducer":
            optimizer.step()
            optimizer.zero_grad()
        else:
            zero.step()

    for number in range(STEPS):
        step(*batch(number, rank))
    train_alone(alone, world, STEPS, torch.optim.SGD, lr=1e-2)
    with contextlib.nullcontext() if way == "reducer" else zero.gathered():
        compare(alone, model.parameters())
