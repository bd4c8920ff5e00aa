"""What the gradient reducer promises, done by hand to copies of all ranks' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def same(what: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, coarse: bool = False) -> None:
    """`coarse`: other dtypes' rounding has reached those of float64."""
    if ours is None or theirs is None:
        assert ours is theirs, f"{what}: {ours} instead of {theirs}"
        return
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    tolerance = max(TOLERANCE.get(ours.dtype, 0.0), 1e-3 if coarse and ours.is_floating_point() else 0.0)
    most = float(theirs.abs().max()) if theirs.numel() and tolerance else 0.0
    most += 1.0 if tolerance > 1e-3 else 1e-3  # summands may cancel
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=tolerance * most, msg=lambda text: f"{what}: {text}\n{ours}\n{theirs}"
    )


class Twins:
    """`models` are what the ranks hold; rank r's is `models[r]`."""

    def __init__(self, models: list[Any]) -> None:
        self.models = models
        self.optimizers: list[Any] = []
        self.coarse = any(p.dtype != torch.float64 for p in models[0].parameters())
        self.used: list[set[str]] = [set() for _ in models]
        self.hooks: list[Any] = []
        self.follow()

    def follow(self) -> None:
        """Takes the models' parameters as they are now."""
        left_out = set(getattr(self.models[0], "_ddp_params_and_buffers_to_ignore", ()))
        named = [(name, p) for name, p in self.models[0].named_parameters() if name not in left_out]
        self.copied = [name for name, _ in named]
        self.names = [name for name, p in named if p.requires_grad]
        self.buffers = [name for name, _ in self.models[0].named_buffers() if name not in left_out]
        while self.hooks:
            self.hooks.pop().remove()
        for model, used in zip(self.models, self.used, strict=True):
            for name, p in model.named_parameters():
                if p.requires_grad:
                    add = p.register_post_accumulate_grad_hook(lambda _p, name=name, used=used: used.add(name))
                    self.hooks.append(add)

    def begin(self, options: dict[str, Any], make: Callable[..., Any] | None) -> None:
        """A new reducer."""
        self.options = options
        self.reductions = 0  # whose averages were handed out
        self.reduced_before = True
        self.pending: dict[str, torch.Tensor] | None = None
        self.static_used: set[str] | None = None
        for used in self.used:
            used.clear()
        self.state_of(0)
        self.inside = [
            {name: make([p]) for name, p in model.named_parameters() if name in self.names} if make else {}
            for model in self.models
        ]

    @torch.no_grad()
    def copy(self, names: list[str], source: int) -> None:
        found = [dict((*model.named_parameters(), *model.named_buffers())) for model in self.models]
        for name in names:
            for tensors in found:
                if tensors is not found[source]:
                    with torch.autograd._unsafe_preserve_version_counter(tensors[name]):
                        tensors[name].copy_(found[source][name])

    def before_forward(self, reduced: bool, source: int = 0) -> None:
        if self.options["broadcast_buffers"] and self.reduced_before:
            self.copy(self.buffers, source)
        self.reduced_before = reduced

    def state_of(self, source: int) -> None:
        self.copy(self.copied, source)
        self.copy(self.buffers, source)

    def parameters(self, name: str) -> list[nn.Parameter]:
        return [dict(model.named_parameters())[name] for model in self.models]

    @torch.no_grad()
    def reduce(self, scale: float = 1.0, ranks: list[int] | None = None) -> None:
        """Averages the gradients of `ranks`, the others giving zeros; hands them to `ranks`."""
        ranks = list(range(len(self.models))) if ranks is None else ranks
        used = set(self.names)
        if self.may_be_unused:
            pairs = [(name, rank) for name in self.names for rank in ranks if name in self.used[rank]]
            used = {name for name, rank in pairs if self.parameters(name)[rank].grad is not None}
        if self.options["static_graph"]:
            self.static_used = used if self.static_used is None else self.static_used
            used = self.static_used
        averages, self.latest = {}, used
        for name in self.names:
            found = [p.grad for rank, p in enumerate(self.parameters(name)) if rank in ranks and p.grad is not None]
            if name in used:
                total = (
                    sum(gradient * scale for gradient in found) if found else torch.zeros_like(self.parameters(name)[0])
                )
                averages[name] = total / len(self.models)
        for rank in ranks:
            self.used[rank].clear()
        self.reductions += not self.options["delay"] or self.pending is not None
        if self.options["delay"]:
            averages, self.pending = self.pending, averages  # type: ignore[assignment]
            for name in self.names:
                for parameter in self.parameters(name):
                    parameter.grad = None
        self.give(averages or {}, ranks)

    @property
    def may_be_unused(self) -> bool:
        return self.options["find_unused_parameters"] or self.options["static_graph"]

    def give(self, averages: dict[str, torch.Tensor], ranks: list[int]) -> None:
        for name, average in averages.items():
            for rank in ranks:
                parameter = self.parameters(name)[rank]
                if parameter.grad is None and not self.may_be_unused and not self.options["delay"]:
                    continue  # a missing gradient was refused
                parameter.grad = average.clone()
                if self.inside[rank]:
                    self.inside[rank][name].step()
        for rank in ranks:
            for name in self.inside[rank]:
                dict(self.models[rank].named_parameters())[name].grad = None

    def flush(self) -> bool:
        if self.pending is None:
            return False
        self.reductions += 1
        averages, self.pending = self.pending, None
        self.give(averages, list(range(len(self.models))))
        return True
