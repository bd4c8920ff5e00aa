"""The window of a Zero: the micro-batches whose gradients one update takes, and the factors of these gradients."""

from __future__ import annotations

import torch

from ringlet.training.window import Window

from .gradients import UnitGradient
from .options import Options
from .traffic import Traffic


class ZeroWindow(Window):
    """`stepped_at`: how many micro-batches there were at the latest step(). `factor`: of clipping. `updating`: the
    window ends now, also if it is not full. `spent`: an update has taken the gradients."""

    def __init__(self, options: Options, units: list[UnitGradient], traffic: Traffic) -> None:
        super().__init__(options.accumulate, traffic.group, units[0].flat.unit.device)
        self._average, self._units, self.reproducible = options.average, units, options.reproducible
        self._ranks = traffic.world if options.reproducible else 1  # whose sum the shards hold, else their average
        self.begin()

    def begin(self) -> None:
        self.seen = self.stepped_at = 0
        self.factor: torch.Tensor | None = None
        self._folded = False
        self.updating = self.spent = False

    @property
    def full(self) -> bool:
        return self.seen >= self.k

    @property
    def stepped(self) -> bool:
        """Whether step() has counted the latest micro-batch, and the window goes on."""
        return not self.full and self.seen == self.stepped_at

    def unfinished(self) -> str | None:
        """Why the gradients are not complete, or None."""
        if self.spent:
            return "that an update has taken: do it before step(), or in a hook before the update"
        if self.full or self.updating:
            return None
        return (
            f"{self.told()}: it is not complete: pass max_norm= to Zero, which clips complete gradients, or call "
            "zero_grad() to drop the window"
        )

    def multiplier(self) -> float | torch.Tensor:
        """The factor between the shards' values and the gradients: of averages over micro-batches, and of clipping."""
        scale = 1.0
        if self._average and not self._folded:
            # backwards of one micro-batch add up, as without a Zero
            scale = 1.0 / (min(self.seen, self.k) * self._ranks)
        return scale if self.factor is None else self.factor * scale

    @torch.no_grad()
    def fold(self) -> None:
        """Multiplies the shards' values by the multiplier, which is 1 then."""
        multiplier = self.multiplier()
        if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
            for unit in self._units:
                unit.value.mul_(multiplier)
        self.factor, self._folded = None, True
