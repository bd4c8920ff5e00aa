"""Short trainings whose result must not depend on the number of ranks: N micro-batches a step, numbered over all."""

from __future__ import annotations

import hashlib
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import ringlet

ROOT = pathlib.Path(__file__).resolve().parents[2]
WINDOW = 8  # micro-batches


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
