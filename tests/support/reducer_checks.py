"""What a gradient reducer must do, as functions of (rank, world) that every rank of a group runs in this order."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringlet import GradientReducer, InvalidUsage

CHECKS: dict[str, Callable[[int, int], None]] = {}
SMALL = {"bucket_mb": 0.0005, "first_bucket_mb": 0.0002}  # 524 and 209 bytes: several buckets for a few layers


def check(function):
    CHECKS[function.__name__] = function
    return function


def mlp(dtype=torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def data(rank: int, step: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(data(rank, step, dtype)).square().mean()


def expected_average(model: nn.Module, world: int, steps: tuple[int, ...] = (0,), loss=loss_of) -> list[torch.Tensor]:
    """The average over ranks of the gradients summed over `steps`, computed alone."""
    replica = copy.deepcopy(model)
    for parameter in replica.parameters():
        parameter.grad = None
    for rank in range(world):
        for step in steps:
            loss(replica, rank, step).backward()
    return [p.grad / world for p in replica.parameters()]


def assert_gradients(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=lambda text, name=name: f"{name}: {text}")


def same(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def train(model: nn.Module, rank: int, steps: int, set_to_none: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, rank, step).backward()
        optimizer.step()


@check
def equals_ddp(rank, world):
    torch.manual_seed(7)
    ours = mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours), bucket_cap_mb=0.001)
    GradientReducer(ours, **SMALL)
    train(ours, rank, 4)
    train(theirs, rank, 4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # two summands and a halving round alike in any order
        torch.testing.assert_close(a, b, rtol=0 if world == 2 else 1e-5, atol=0 if world == 2 else 1e-6)


def sends_late(reducer):
    """Whether its buckets are sent at the end of a backward, because every processor is busy with it."""
    device = torch.device("cpu")
    return reducer._channel.in_place(device) and not reducer._channel.overlaps(device)


@check
def values_that_a_graph_needs_are_not_overwritten(rank, world):
    model = mlp()
    GradientReducer(model, **SMALL)
    loss_of(model, rank).backward(create_graph=True)
    assert_gradients(model, expected_average(model, world))
    assert all(p.grad.grad_fn is None for p in model.parameters())  # not the graph's own tensors


class Branches(nn.Module):
    """Two layers, each of which a call may leave out or take first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in names]).square().mean()


@check
def unused_parameters_count_zero_when_allowed(rank, world):
    model = Branches()
    GradientReducer(model, find_unused_parameters=True, **SMALL)
    used = ["b", "ab", "b"]
    expected = expected_average(model, world, loss=lambda m, r, step: m(data(r, step), used[r]))
    for _ in range(2):
        model.zero_grad()
        model(data(rank), used[rank]).backward()
        assert_gradients(model, expected)


@check
def used_only_inside_no_sync_is_reduced(rank, world):
    model = Branches()
    reducer = GradientReducer(model, **SMALL)
    with reducer.no_sync():
        model(data(rank), "a").backward()
    model(data(rank), "b").backward()
    names = ["a", "b"]
    assert_gradients(model, expected_average(model, world, (0, 1), lambda m, r, step: m(data(r), names[step])))


@check
def hooks_in_different_orders_and_one_rebuild(rank, world):
    model = Branches()
    reducer = GradientReducer(model, **SMALL)
    names = "ba" if rank == 0 else "ab"  # rank 0's is not the order of registration
    expected = expected_average(model, world, loss=lambda m, r, step: m(data(r, step), "ab"))
    for _ in range(3):
        model.zero_grad()
        model(data(rank), names).backward()
        assert_gradients(model, expected)
        stats = reducer.stats()
        everyone = [None] * world
        dist.all_gather_object(everyone, (stats["ready_order"], stats["bucket_parameters"]))
        assert everyone[0][0] != everyone[1][0]
        assert all(buckets == everyone[0][1] for _, buckets in everyone)
        assert stats["rebuilt"]
        assert [name for bucket in everyone[0][1] for name in bucket] == everyone[0][0]


class Checkpointed(nn.Module):
    """Layers called in the order of `path`; those after the first in backwards inside the backward."""

    def __init__(self, path: list[int], layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[self.path[0]](x)
        for index in self.path[1:]:
            x = checkpoint(self.layers[index], x, use_reentrant=True)
        return x


@check
def reentrant_checkpoints(rank, world):
    model = Checkpointed([0, 1, 1, 2], layers=3)  # layer 1 is reached twice, and before the last of its bucket
    GradientReducer(model)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(model, world))


@check
def a_group_of_some_ranks(rank, world):
    group = dist.new_group([0, 1])
    if rank < 2:
        model = mlp()
        GradientReducer(model, group=group, **SMALL)
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(model, 2))


@check
def copies_and_removal_leave_the_module_alone(rank, world):
    model = mlp()
    reducer = GradientReducer(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        loss_of(copied, rank).backward()
    assert reducer.stats()["launches"] == 0
    reducer.remove()
    loss_of(model, rank).backward()
    assert reducer.stats()["launches"] == 0
    assert_gradients(model, expected_average(model, 1, loss=lambda m, _, step: loss_of(m, rank, step)))


# --- what it must refuse, and how clearly


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


@check
def an_interrupted_backward(rank, world):
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    GradientReducer(model, group=group)  # one bucket: nothing was sent, the next step is a fresh start
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    model.zero_grad()
    loss_of(model, rank).backward()
    assert_gradients(model, expected_average(model, world))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
    reducer = GradientReducer(model, group=group, **SMALL)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    if sends_late(reducer):
        model.zero_grad()
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(model, world))
        return
    with pytest.raises(InvalidUsage, match=r"stopped after \d of \d buckets"):
        model(data(rank))


@check
def what_an_interrupted_backward_leaves_is_averaged(rank, world):
    """Also if the next backward of no rank reaches these parameters."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    reducer = GradientReducer(model, group=dist.new_group(), find_unused_parameters=True)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    assert not reducer.flush(), "it hands nothing over without delay=1"
    expected = model[1].weight.grad.clone()
    dist.all_reduce(expected)
    model[0](data(rank)).sum().backward()
    torch.testing.assert_close(model[1].weight.grad, expected / world)


@check
def different_models_are_refused_by_rank_and_name(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if rank == 1 else 4))
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'parameter 1\.weight .*\[4, 4\].*, rank 1 has .*\[5, 4\]"):
        GradientReducer(model)
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'nothing', rank 1 has 'buffer extra"):
        model = nn.Linear(2, 2)
        if rank == 1:
            model.register_buffer("extra", torch.ones(1))
        GradientReducer(model)
    with pytest.raises(InvalidUsage, match="rank 0 has 'settings bucket_mb=1 "):
        GradientReducer(nn.Linear(2, 2), bucket_mb=2 if rank == 1 else 1)
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'settings .* optimizer_in_backward=False', rank 1"):
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        GradientReducer(nn.Linear(2, 2), optimizer_in_backward=make if rank == 1 else None)


@check
def what_cannot_be_reduced_is_refused(rank, world):
    with pytest.raises(InvalidUsage, match="no parameter of Linear requires a gradient"):
        GradientReducer(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(InvalidUsage, match="0 makes sparse gradients"):
        GradientReducer(nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    with pytest.raises(InvalidUsage, match=r"bucket_mb must be a number of MiB above 0 .*, got 0"):
        GradientReducer(nn.Linear(2, 2), bucket_mb=0)


@check
def the_algorithm_is_chosen_where_there_is_one(rank, world):
    if dist.get_backend() != "ringlet":
        with pytest.raises(InvalidUsage, match=r"algorithm='ring' needs a group on the ringlet backend, .* on gloo"):
            GradientReducer(nn.Linear(2, 2), algorithm="ring")
        return
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for algorithm in ("ring", "butterfly", "two_shot"):
        model = mlp()
        GradientReducer(model, algorithm=algorithm, **SMALL)
        before = backend.algorithm
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(model, world))
        assert backend.algorithm == before
    with pytest.raises(InvalidUsage, match="triangle"):
        GradientReducer(nn.Linear(2, 2), algorithm="triangle")
