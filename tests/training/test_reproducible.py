"""Training with reproducible=True gives the same bits on every number of ranks; what it needs is refused otherwise."""

import functools
import hashlib
import math
import pathlib
import sys
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import ringlet
from ranks import on, with_kernels
from refusals import refused
from ringlet.training.reproducible import norms_over_ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
WINDOW = 8  # micro-batches
STEPS = range(3)


# --- the trainings: N micro-batches a step, numbered over all ranks


def the_demos_model(alike: bool = True) -> Any:
    """(model, a micro-batch of a step -> its loss)."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    from char_transformer import CharTransformer, Size, Text, loss_of

    text, size = Text(), Size(width=32, layers=2, context=16, batch=2)
    torch.manual_seed(1)
    model = CharTransformer(text.vocabulary, size)
    return model, lambda step, number: loss_of(model, *text.batch(size, step, number))


def with_frozen_norm(alike: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Convolutions around a batch norm in eval mode. Every third micro-batch, or step if the micro-batches of a step
    are `alike`, does not use `rare`."""
    torch.manual_seed(2)
    body = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Tanh(), nn.Flatten(), nn.Linear(5 * 16, 7))
    model = nn.ModuleDict({"body": body, "rare": nn.Linear(7, 7)}).to(dtype)
    body[1].running_mean.normal_()
    body[1].eval()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, inputs: torch.Tensor, rare: bool) -> torch.Tensor:
            found = model["body"](inputs)
            return model["rare"](found) if rare else found

    made = Both()

    def loss(step: int, number: int) -> torch.Tensor:
        made.get_submodule("parts.body.1").eval()
        generator = torch.Generator().manual_seed(1000 * step + number)
        inputs = torch.randn(3, 2, 6, 6, generator=generator).to(dtype)
        return made(inputs, (step if alike else number) % 3 != 0).float().square().mean()

    return made, loss


MODELS = {
    "demo": the_demos_model,
    "frozen norm": with_frozen_norm,
    "bfloat16": lambda alike: with_frozen_norm(alike, torch.bfloat16),
}


def digest_of(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def trained_by_torch(rank: int, world: int, model_name: str, steps: range, alike: bool = False) -> str:
    """The digest of the weights that torch alone gives, adding up a step's gradients along the tree."""
    model, loss = MODELS[model_name](alike)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in steps:
        sums = []
        for number in range(WINDOW):
            optimizer.zero_grad()
            loss(step, number).backward()
            sums.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        while len(sums) > 1:
            sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums[::2], sums[1::2], strict=True)]
        for parameter, total in zip(model.parameters(), sums[0], strict=True):
            parameter.grad = total / WINDOW
        optimizer.step()
    return digest_of(model.parameters())


def train(
    rank: int,
    world: int,
    model_name: str,
    trainer: str,
    steps: range,
    folder: str | None = None,
    clip: float | None = None,
    **options: Any,
) -> str:
    """Trains in a process group; returns the digest of the weights. trainer: "reducer", or "zero1" to "zero3".

    clip: the norm to which torch clips the gradients.
    folder: where it takes its state from before a first step above 0, and leaves it at the end.
    """
    model, loss = MODELS[model_name](trainer == "zero3")  # whose ranks run the same modules
    k = WINDOW // world
    saved = None if folder is None else pathlib.Path(folder)
    reproducible = options.pop("reproducible", True)
    if trainer == "reducer":
        unused = model_name != "demo"
        reducer = ringlet.GradientReducer(
            model, find_unused_parameters=unused, bucket_mb=0.01, first_bucket_mb=0.005, reproducible=reproducible,
            **options,
        )  # fmt: skip
        window = reducer.accumulate(k)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if saved and steps.start:
            state = torch.load(saved / "state")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in steps:
            for number in window.micro_batches:
                loss(step, number).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if saved and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved / "state")
        if saved:
            dist.barrier()
        return digest_of(model.parameters())
    zero = ringlet.Zero(
        model, torch.optim.AdamW, int(trainer[-1]), accumulate=k, lr=0.01, bucket_elements=2000,
        persistence_elements=20, reproducible=reproducible, **options,
    )  # fmt: skip
    if saved and steps.start:
        dcp.load({"zero": zero}, checkpoint_id=saved / "zero")
    for step in steps:
        for number in zero.micro_batches:
            loss(step, number).backward()
            if clip is not None and number == zero.micro_batches[-1]:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            zero.step()
    if saved:
        dcp.save({"zero": zero}, checkpoint_id=saved / "zero")
    with zero.gathered():
        return digest_of(model.parameters())


# --- their results


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
def test_every_processor_level_gives_the_same_weights(own_pool, by_torch, level):
    for kernels in own_pool.values(with_kernels, 2, level, join="nothing"):
        if level not in kernels["available"]:
            pytest.skip(f"this processor has no {level}")
        assert kernels["chosen"] == level
    assert digests(own_pool, 2, "demo", "reducer", STEPS) == by_torch("demo", False)


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


@on((2, 4), "dist:ringlet")
def test_what_would_break_the_promise_is_refused(rank, world):
    model = nn.Linear(2, 2)

    def make(**options):
        return ringlet.GradientReducer(model, reproducible=True, **options)

    refused("ring|nobody", make, algorithm="ring" if world > 2 else "nobody")
    refused("leave out delay=", make, delay=1)
    refused("leave out accumulate_dtype=", make, accumulate_dtype=torch.float32)
    reducer = make()
    refused("power of two of micro-batches.*got 3", reducer.accumulate, 3)
    refused("leave average=True", reducer.accumulate, 2, average=False)
    refused("call accumulate", lambda: reducer.no_sync().__enter__())
    refused("reproducible=True", lambda: reducer.join().__enter__())
    refused("reproducible=True", reducer.register_comm_hook, None, print)
    window = reducer.accumulate(4)
    assert list(window.micro_batches) == list(range(4 * rank, 4 * rank + 4))
    inputs = torch.ones(1, 2)
    for _ in range(3):
        model(inputs).sum().backward()
        assert model.weight.grad is None, "a window's gradients are not in .grad before it closes"
    refused("3 of 4 micro-batches, no power of two", window.finish)
    for _ in range(2):
        model(inputs).sum().backward()
    assert window.finish()
    assert model.bias.grad.tolist() == [1, 1]
    for _ in range(3):
        model(inputs).sum().backward()
    refused("weight, bias held values", lambda: model(inputs).sum().backward())
    assert model.bias.grad.tolist() == [1, 1]
    reducer.remove()
    ringlet.GradientReducer(nn.Linear(2, 2))
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ringlet.GradientReducer(normed, reproducible=True)
    refused("1 is a BatchNorm1d in training mode", normed, torch.ones(3, 2))
    normed.eval()
    normed(torch.ones(3, 2)).sum().backward()

    def zero(**options):
        return ringlet.Zero(nn.Linear(2, 2), torch.optim.SGD, lr=0.1, reproducible=True, **options)

    refused("power of two of micro-batches.*got 3", zero, accumulate=3)
    made = zero(stage=2, accumulate=2)
    assert list(made.micro_batches) == [rank, rank + world]
    made.module(inputs).sum().backward()
    assert not made.step()
    refused("every window is full", made.step, partial=True)
    made.module(inputs).sum().backward()
    clip = nn.utils.clip_grad_norm_
    refused("those of order 2 and inf do not", clip, made.module.parameters(), 1.0, norm_type=3)
    refused("with reproducible=True.*those of the module", clip, made.optimizer.param_groups[0]["params"], 1.0)
    clip(made.module.parameters(), 1.0, norm_type=torch.inf)
    assert made.step()


def elsewhere(rank, world, words):
    refused(words, ringlet.GradientReducer, nn.Linear(2, 2), reproducible=True)


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
        refused("get_num_threads", ringlet.GradientReducer, nn.Linear(2, 2), reproducible=True)
    finally:
        torch.set_num_threads(before)
