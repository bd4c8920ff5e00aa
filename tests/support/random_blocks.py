"""Blocks of which random trainings build modules, each of (rows, width) to the same, and outputs of a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Nothing(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.rand(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.empty.sum()


class Strided(nn.Module):
    """A weight that is transposed and dense, or one with gaps."""

    def __init__(self, width: int, transposed: bool) -> None:
        super().__init__()
        values = torch.randn(width, width).t() if transposed else torch.randn(width, 2 * width)[:, ::2]
        self.weight = nn.Parameter(values / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Called(nn.Module):
    """A module that is called in a way of its own."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


@dataclass
class Output:
    y: torch.Tensor


class Hidden:
    """An output in which nobody finds a tensor."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


FORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda y: y,
    "dict": lambda y: {"y": [y], "aside": None},
    "tuple": lambda y: (None, y),
    "dataclass": Output,
    "hidden": Hidden,
}


def tensor_of(output: Any) -> torch.Tensor:
    """The tensor in an output of one of these forms."""
    if isinstance(output, dict):
        return output["y"][0]
    if isinstance(output, tuple):
        return output[1]
    return output.y if isinstance(output, Output | Hidden) else output
