"""Training with reproducible=True gives the same bits on every number of ranks; what it needs is refused otherwise."""

import functools
import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringlet
from ranks import Pool, on, with_kernels
from reproducible_training import MODELS, train, trained_by_torch
from ringlet.errors import InvalidUsage
from ringlet.training.reproducible import norms_over_ranks

STEPS = range(3)


def digests(pool, world, *args, join="dist:ringlet", **options):
    found = set(pool.values(with_options, world, args, options, join=join))
    assert len(found) == 1, "ranks have the same weights"
    return found.pop()


def with_options(rank, world, args, options):
    return train(rank, world, *args, **options)


@pytest.fixture(scope="module")
def by_torch(pool):
    """The digest of the same training in one process, without ringlet."""

    @functools.cache
    def found(model, alike):
        (digest,) = pool.values(trained_by_torch, 1, model, STEPS, alike, join="nothing")
        return digest

    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("trainer", ["reducer", "zero1", "zero2", "zero3"])
def test_every_number_of_ranks_gives_the_same_weights(pool, by_torch, model, trainer):
    worlds = (1, 2, 4, 8) if trainer in ("reducer", "zero3") else (1, 4)
    seen = {world: digests(pool, world, model, trainer, STEPS) for world in worlds}
    assert len(set(seen.values())) == 1, seen
    if model != "bfloat16" or trainer == "reducer":  # of a bfloat16 model Zero keeps the weights in float32, too
        assert seen[1] == by_torch(model, trainer == "zero3")


@pytest.mark.parametrize(
    ("trainer", "world", "join", "options"),
    [
        ("reducer", 2, "dist:ringlet@tcp", {}),
        ("reducer", 2, "dist:ringlet@mixed", {}),
        ("reducer", 4, "dist:ringlet@blocks", {}),
        ("zero1", 2, "dist:gloo", {}),
        ("zero1", 2, "dist:ringlet", {"overlap": False}),
        ("zero2", 4, "dist:ringlet@tcp", {}),
        ("zero3", 4, "dist:ringlet@mixed", {}),
    ],
)
def test_every_place_gives_the_same_weights(pool, by_torch, trainer, world, join, options):
    """Registered memory of shared memory and of hosts, gloo's ordinary memory; calls beside the backward, or not."""
    found = digests(pool, world, "demo", trainer, STEPS, join=join, **options)
    assert found == by_torch("demo", False)


@pytest.mark.parametrize("level", ["avx512", "avx2", "portable"])
def test_every_processor_level_gives_the_same_weights(tmp_path, by_torch, level):
    fresh = Pool(tmp_path)  # a process chooses its kernels once
    try:
        for kernels in fresh.values(with_kernels, 2, level, join="nothing"):
            if level not in kernels["available"]:
                pytest.skip(f"this processor has no {level}")
            assert kernels["chosen"] == level
        assert digests(fresh, 2, "demo", "reducer", STEPS) == by_torch("demo", False)
    finally:
        fresh.end()


def test_halving_doubling_has_the_same_tree(pool):
    by_halves = digests(pool, 4, "demo", "reducer", STEPS, algorithm="halving_doubling")
    assert by_halves == digests(pool, 1, "demo", "reducer", STEPS)


def test_a_plain_reducer_on_gloo_gives_other_bits_in_another_world(pool):
    seen = [digests(pool, w, "demo", "reducer", STEPS, join="dist:gloo", reproducible=False) for w in (2, 4)]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("trainer", ["reducer", "zero2"])
def test_training_goes_on_in_another_world(pool, tmp_path, trainer):
    digests(pool, 4, "demo", trainer, range(2), str(tmp_path))
    resumed = digests(pool, 2, "demo", trainer, range(2, 4), str(tmp_path))
    assert resumed == digests(pool, 8, "demo", trainer, range(4))


@pytest.mark.parametrize(
    ("trainer", "how"),
    [("reducer", "clip"), ("zero1", "clip"), ("zero1", "max_norm"), ("zero2", "max_norm"), ("zero3", "clip")],
)
def test_clipping_does_not_depend_on_the_number_of_ranks(pool, trainer, how):
    """`clip`: by torch's function."""
    seen = {world: digests(pool, world, "demo", trainer, STEPS, **{how: 0.05}) for world in (1, 2, 4)}
    assert len(set(seen.values())) == 1, seen
    assert seen[1] != digests(pool, 1, "demo", trainer, STEPS), "it clips"


NUMBERS = {
    "everyday": [float(number) for number in torch.randn(999, generator=torch.Generator().manual_seed(1))],
    "one": [-3.0],
    "zeros": [0.0, -0.0],
    "tiny": [1e-45] * 4 + [3e-42],
    "huge": [3e38] * 5 + [1.0],
    "infinite": [1.0, -math.inf, 2.0],
    "no number": [1.0, math.inf, math.nan],
    "none": [],
}


def their_norms(rank, world):
    """Of each list of NUMBERS every rank has every world-th number."""
    lists = [
        [torch.tensor(numbers[rank::world][:7]), torch.tensor(numbers[rank::world][7:])] for numbers in NUMBERS.values()
    ]
    return norms_over_ranks(lists, dist.group.WORLD, torch.device("cpu")).tolist()


@pytest.mark.parametrize(("world", "join"), [(1, "dist:gloo"), (2, "dist:ringlet"), (4, "dist:gloo")])
def test_a_norm_is_that_of_the_exact_sum(pool, world, join):
    said = pool.values(their_norms, world, join=join)
    assert all(repr(one) == repr(said[0]) for one in said)
    for found, (name, numbers) in zip(said[0], NUMBERS.items(), strict=True):
        squares = [Fraction(float(torch.tensor(number))) ** 2 for number in numbers if math.isfinite(number)]
        exact = math.nan if name == "no number" else math.inf if name == "infinite" else exact_root(sum(squares))
        assert found == pytest.approx(exact, rel=2**-50, nan_ok=True), name


def exact_root(square):
    scaled = square * Fraction(2) ** 600
    return float(Fraction(math.isqrt(int(scaled)), 2**300))


def refused(call, words):
    with pytest.raises(InvalidUsage, match=words):
        call()


@on((2, 4), "dist:ringlet")
def test_what_would_break_the_promise_is_refused(rank, world):
    model = nn.Linear(2, 2)

    def make(**options):
        return ringlet.GradientReducer(model, reproducible=True, **options)

    refused(lambda: make(algorithm="ring" if world > 2 else "nobody"), "ring|nobody")
    refused(lambda: make(delay=1), "leave out delay=")
    refused(lambda: make(accumulate_dtype=torch.float32), "leave out accumulate_dtype=")
    reducer = make()
    refused(lambda: reducer.accumulate(3), "power of two of micro-batches.*got 3")
    refused(lambda: reducer.accumulate(2, average=False), "leave average=True")
    refused(lambda: reducer.no_sync().__enter__(), "call accumulate")
    refused(lambda: reducer.join().__enter__(), "reproducible=True")
    refused(lambda: reducer.register_comm_hook(None, print), "reproducible=True")
    window = reducer.accumulate(4)
    assert list(window.micro_batches) == list(range(4 * rank, 4 * rank + 4))
    inputs = torch.ones(1, 2)
    for _ in range(3):
        model(inputs).sum().backward()
        assert model.weight.grad is None, "a window's gradients are not in .grad before it closes"
    refused(window.finish, "3 of 4 micro-batches, no power of two")
    for _ in range(2):
        model(inputs).sum().backward()
    assert window.finish()
    assert model.bias.grad.tolist() == [1, 1]
    for _ in range(3):
        model(inputs).sum().backward()
    refused(lambda: model(inputs).sum().backward(), "weight, bias held values")
    assert model.bias.grad.tolist() == [1, 1]
    reducer.remove()
    ringlet.GradientReducer(nn.Linear(2, 2))
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ringlet.GradientReducer(normed, reproducible=True)
    refused(lambda: normed(torch.ones(3, 2)), "1 is a BatchNorm1d in training mode")
    normed.eval()
    normed(torch.ones(3, 2)).sum().backward()

    def zero(**options):
        return ringlet.Zero(nn.Linear(2, 2), torch.optim.SGD, lr=0.1, reproducible=True, **options)

    refused(lambda: zero(accumulate=3), "power of two of micro-batches.*got 3")
    made = zero(stage=2, accumulate=2)
    assert list(made.micro_batches) == [rank, rank + world]
    made.module(inputs).sum().backward()
    assert not made.step()
    refused(lambda: made.step(partial=True), "every window is full")
    made.module(inputs).sum().backward()
    clip = nn.utils.clip_grad_norm_
    refused(lambda: clip(made.module.parameters(), 1.0, norm_type=3), "those of order 2 and inf do not")
    refused(lambda: clip(made.optimizer.param_groups[0]["params"], 1.0), "with reproducible=True.*those of the module")
    clip(made.module.parameters(), 1.0, norm_type=torch.inf)
    assert made.step()


def elsewhere(rank, world, words):
    refused(lambda: ringlet.GradientReducer(nn.Linear(2, 2), reproducible=True), words)


@pytest.mark.parametrize(
    ("world", "join", "words"),
    [
        (3, "dist:ringlet", "3 ranks are no power of two"),
        (2, "dist:gloo", "init_process_group"),
        (4, "dist:ringlet@mixed", "number the ranks host after host"),
    ],
)
def test_a_group_with_another_tree_is_refused(pool, world, join, words):
    pool.values(elsewhere, world, words, join=join)


@on("two")
def test_ranks_have_the_same_number_of_threads(rank, world):
    before = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        refused(lambda: ringlet.GradientReducer(nn.Linear(2, 2), reproducible=True), "get_num_threads")
    finally:
        torch.set_num_threads(before)


@on(1, "dist:ringlet")
def test_a_stopped_backward_drops_the_window(rank, world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reducer = ringlet.GradientReducer(model, reproducible=True)
    reducer.accumulate(2)
    inputs = torch.ones(1, 2)
    model(inputs).sum().backward()

    def stop(_):
        raise ValueError("stop")

    handle = model[0].weight.register_hook(stop)
    with pytest.raises(ValueError, match="stop"):
        model(inputs).sum().backward()
    handle.remove()
    refused(lambda: model(inputs), "stopped in micro-batch 2")
