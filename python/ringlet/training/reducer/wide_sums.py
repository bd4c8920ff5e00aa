"""Sums of 16-bit gradients over a window, in float32. `.grad` shows them rounded.

Autograd would add up in `.grad` itself, and a bfloat16 sum of equal gradients ends at 256 of them. So a backward that
adds to gradients that are not reduced yet finds no `.grad`, and what arrives is added here.
"""

from __future__ import annotations

import torch


class WideSums:
    """`apart`: whether this backward adds up here. Costs 4 bytes an element while a window is open."""

    def __init__(self, parameters: list[torch.nn.Parameter], dtype: torch.dtype | None) -> None:
        sums = dtype in (None, torch.float32)
        self._narrow = [(i, p) for i, p in enumerate(parameters) if sums and p.is_floating_point() and p.itemsize == 2]
        self._sums: dict[int, torch.Tensor] = {}
        self._aside: dict[int, torch.Tensor] = {}

    @property
    def apart(self) -> bool:
        return bool(self._aside)

    @torch.no_grad()
    def begin(self, arrived: int | None) -> None:
        """A backward begins. The gradient of parameter `arrived` is in `.grad` already."""
        for index, parameter in self._narrow:
            grad = parameter.grad
            if index == arrived or grad is None:  # it may have been dropped, with what it was rounded from
                self._sums.pop(index, None)
            if index == arrived or grad is None or grad.requires_grad or grad.layout is not torch.strided:
                continue
            known = self._sums.get(index)
            if known is None:
                self._sums[index] = grad.float()
            elif not torch.equal(rounded := known.to(grad.dtype), grad):  # others have written into `.grad`
                self._sums[index] = torch.where(rounded == grad, known, grad.float())
            self._aside[index] = grad
            parameter.grad = None

    def add(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has arrived: puts the rounded sum into `.grad`."""
        aside = self._aside.pop(index, None)
        if aside is None:
            return
        arrived, parameter.grad = parameter.grad, aside
        if arrived is not None:
            self._sums[index].add_(arrived)
            aside.copy_(self._sums[index])

    def put_back(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient will not arrive in this backward."""
        aside = self._aside.pop(index, None)
        if aside is not None:
            parameter.grad = aside

    def end(self) -> None:
        """The backward has ended, or raised: puts back what nothing has been added to."""
        for index, parameter in self._narrow:
            self.put_back(index, parameter)

    def forget(self) -> None:
        """The gradients are reduced, or dropped."""
        self._sums.clear()
        self._aside.clear()
