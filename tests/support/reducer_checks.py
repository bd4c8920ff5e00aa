"""What a gradient reducer must do, as functions of (rank, world) that every rank of a group runs in this order."""

import copy
import io
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ringlet
from ringlet import GradientReducer
from ringlet.training.reducer.channel import MOST_RANKS_IN_PLACE

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


def places(model: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters()]


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


@check
def equals_full_batch(rank, world):
    torch.manual_seed(7)
    ours = mlp(torch.float64)
    alone = copy.deepcopy(ours)
    GradientReducer(ours, **SMALL)
    train(ours, rank, 4)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.cat([data(r, step, torch.float64) for r in range(world)])
        alone(batch).square().mean().backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@check
def construction_copies_rank_0(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # seeded by rank
    model[1].running_mean.fill_(rank)
    model[0].weight = nn.Parameter(torch.randn(4, 8)[:, ::2])  # not contiguous
    GradientReducer(model)
    for value in model.state_dict().values():
        everyone = [torch.empty_like(value.contiguous()) for _ in range(world)]
        dist.all_gather(everyone, value.contiguous())
        assert all(torch.equal(other, everyone[0]) for other in everyone)
    assert model[1].running_mean.eq(0).all()


def in_place(world):
    """Whether ringlet reduces every gradient by itself, where autograd has put it."""
    return dist.get_backend() == "ringlet" and world <= MOST_RANKS_IN_PLACE


def sends_late(reducer):
    """Whether its buckets are sent at the end of a backward, because every processor is busy with it."""
    device = torch.device("cpu")
    return reducer._channel.in_place(device) and not reducer._channel.overlaps(device)


@check
def gradients_are_views_of_the_buckets_or_stay_where_they_are(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    loss_of(model, rank).backward()
    buckets = reducer._flat.buckets
    assert len(buckets) > 2
    assert all(bucket.has_buffer != in_place(world) for bucket in buckets)
    if in_place(world):
        return
    for gradient in reducer._flat.gradients:
        start = gradient.parameter.grad.data_ptr() - gradient.bucket.buffer.data_ptr()
        assert 0 <= start <= gradient.bucket.nbytes - gradient.parameter.grad.nbytes
    if dist.get_backend() == "ringlet":
        assert all(ringlet.is_registered(p.grad) for p in model.parameters())


@check
def values_that_a_graph_needs_are_not_overwritten(rank, world):
    model = mlp()
    GradientReducer(model, **SMALL)
    loss_of(model, rank).backward(create_graph=True)
    assert_gradients(model, expected_average(model, world))
    assert all(p.grad.grad_fn is None for p in model.parameters())  # not the graph's own tensors


@check
def zero_grad_both_ways(rank, world):
    model = mlp()
    GradientReducer(model, **SMALL)
    expected = expected_average(model, world)
    loss_of(model, rank).backward()
    before = places(model)
    for set_to_none in (True, False, False, True, True):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, rank).backward()
        assert_gradients(model, expected)
        assert places(model) == before or in_place(world)


@check
def two_backwards_add_up(rank, world):
    model = mlp()
    GradientReducer(model, **SMALL)
    expected = [
        a + b for a, b in zip(expected_average(model, world), expected_average(model, world, (1,)), strict=True)
    ]
    loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1).backward()
    assert_gradients(model, expected)
    model.zero_grad()
    first, second = loss_of(model, rank, 0), loss_of(model, rank, 1)  # two forwards, then two backwards
    first.backward()
    second.backward()
    assert_gradients(model, expected)


@check
def no_sync_accumulates_and_then_averages_the_sum(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    for _ in range(2):  # from the first backward on, and again after a reduction
        launches = reducer.stats()["launches"]
        with reducer.no_sync():
            loss_of(model, rank, 0).backward()
            local = expected_average(model, 1, loss=lambda m, _, step: loss_of(m, rank, step))
            assert_gradients(model, local)
            loss_of(model, rank, 1).backward()
        assert reducer.stats()["launches"] == launches
        loss_of(model, rank, 2).backward()
        assert reducer.stats()["launches"] > launches
        assert_gradients(model, expected_average(model, world, (0, 1, 2)))
        model.zero_grad()


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
def gradients_unused_everywhere_stay_untouched(rank, world):
    model = Branches()
    GradientReducer(model, find_unused_parameters=True, **SMALL)
    model(data(rank), "b").backward()
    assert model.a.weight.grad is None and model.b.weight.grad is not None
    for fresh in (False, True):
        for place, parameter in enumerate(model.b.parameters()):
            # each rank's own value, in the bucket or beside it
            parameter.grad = torch.full_like(parameter, rank + place) if fresh else parameter.grad.fill_(rank + place)
        model(data(rank), "a").backward()
        for place, parameter in enumerate(model.b.parameters()):
            assert torch.equal(parameter.grad, torch.full_like(parameter, rank + place))


@check
def gradients_that_are_there_already_count(rank, world):
    model = Branches()
    GradientReducer(model, find_unused_parameters=True, **SMALL)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 6.0 * rank)
    replica = copy.deepcopy(model)
    model(data(rank), "a" if rank == 0 else "b").backward()
    expected = expected_average(replica, world, loss=lambda m, r, step: m(data(r, step), "a" if r == 0 else "b"))
    assert_gradients(model, [gradient + 3.0 * (world - 1) for gradient in expected])


@check
def used_inside_no_sync_and_then_dropped(rank, world):
    model = Branches()
    reducer = GradientReducer(model, find_unused_parameters=True, **SMALL)
    with reducer.no_sync():
        model(data(rank), "ab").backward()
    model.zero_grad()
    model(data(rank), "b").backward()
    assert model.a.weight.grad is None


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
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(data(rank), names).backward()
        assert_gradients(model, expected)
        seen.append(places(model))
        assert seen[-1] == seen[0] or in_place(world)  # already the rebuilt buckets after the first backward
        stats = reducer.stats()
        everyone = [None] * world
        dist.all_gather_object(everyone, (stats["ready_order"], stats["bucket_parameters"]))
        assert everyone[0][0] != everyone[1][0]
        assert all(buckets == everyone[0][1] for _, buckets in everyone)
        assert stats["rebuilt"]
        assert [name for bucket in everyone[0][1] for name in bucket] == everyone[0][0]


@check
def shared_parameters(rank, world):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    reducer = GradientReducer(model, **SMALL)
    loss_of(model, rank).backward()
    assert_gradients(model, expected_average(model, world))
    assert sum(names.count("0.weight") for names in reducer.stats()["bucket_parameters"]) == 1


class Mixed(nn.Module):
    """Parameters of many dtypes and layouts, gradients known by hand: every gradient is full of the rank's factor."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16, torch.float32]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(5, 3).to(dtype)) for dtype in dtypes)
        self.last = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, factor: float) -> torch.Tensor:
        return sum((weight * factor).sum().real.double() for weight in self.parameters())


@check
def mixed_dtypes_have_buckets_of_their_own(rank, world):
    model = Mixed()
    reducer = GradientReducer(model)
    assert len(reducer.stats()["bucket_bytes"]) == 5
    for _ in range(2):
        model.zero_grad()
        model(2.0 * rank).backward()
        for parameter in model.parameters():
            assert parameter.grad.dtype == parameter.dtype and parameter.grad.stride() == parameter.stride()
            assert torch.equal(parameter.grad, torch.full_like(parameter, world - 1.0))


@check
def autograd_grad_reduces_nothing(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    gradients = torch.autograd.grad(loss_of(model, rank), list(model.parameters()))
    assert reducer.stats()["launches"] == 0 and all(p.grad is None for p in model.parameters())
    (penalty,) = torch.autograd.grad(loss_of(model, rank), [model[0].weight], create_graph=True)
    (loss_of(model, rank) + penalty.square().sum()).backward()
    assert len(gradients) == 6 and reducer.stats()["backwards"] == 1


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
def stats_tell_what_happened(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    for step in range(3):
        loss_of(model, rank, step).backward()
    stats = reducer.stats()
    assert stats["backwards"] == 3 and stats["launches"] >= 3 * 2
    assert sorted(stats["ready_order"]) == sorted(name for name, _ in model.named_parameters())
    assert sum(stats["bucket_bytes"]) >= sum(p.nbytes for p in model.parameters())
    assert stats["total_communication_s"] >= stats["communication_s"] > 0
    assert stats["total_exposed_s"] >= stats["exposed_s"] > 0
    assert stats["overlapped_s"] >= 0


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
