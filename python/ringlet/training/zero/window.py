"""The window of a Zero: the micro-batches whose gradients one update takes, and the factors of these gradients."""

from __future__ import annotations

import torch

from .gradients import UnitGradient
from .options import Options


class Window:
    """`micro_batches`: backwards so far; `stepped_at`: how many of them there were at the latest step(). `factor`: of
    clipping. `updating`: the window ends now, also if it is not full."""

    def __init__(self, options: Options, units: list[UnitGradient], world: int) -> None:
        self._options, self._units = options, units
        self._ranks = world if options.reproducible else 1  # whose sum the shards hold, else their average
        self.begin()

    @property
    def reproducible(self) -> bool:
        return self._options.reproducible

    def begin(self) -> None:
        self.micro_batches = self.stepped_at = 0
        self.factor: torch.Tensor | None = None
        self._folded = False
        self.updating = False

    def count(self) -> None:
        self.micro_batches += 1
        self.factor = None

    @property
    def full(self) -> bool:
        return self.micro_batches >= self._options.accumulate

    @property
    def stepped(self) -> bool:
        """Whether step() has counted the latest micro-batch, and the window goes on."""
        return not self.full and self.micro_batches == self.stepped_at

    def unfinished(self) -> str | None:
        """Why the gradients are not complete, or None."""
        if self.full or self.updating:
            return None
        return (
            f"after {self.micro_batches} of {self._options.accumulate} micro-batches: it is not complete: pass "
            "max_norm= to Zero, which clips complete gradients, or call zero_grad() to drop the window"
        )

    def multiplier(self) -> float | torch.Tensor:
        """The factor between the shards' values and the gradients: of averages over micro-batches, and of clipping."""
        scale = 1.0
        if self._options.average and not self._folded:
            # backwards of one micro-batch add up, as without a Zero
            scale = 1.0 / (min(self.micro_batches, self._options.accumulate) * self._ranks)
        return scale if self.factor is None else self.factor * scale

    @torch.no_grad()
    def fold(self) -> None:
        """Multiplies the shards' values by the multiplier, which is 1 then."""
        multiplier = self.multiplier()
        if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
            for unit in self._units:
                unit.value.mul_(multiplier)
        self.factor, self._folded = None, True
