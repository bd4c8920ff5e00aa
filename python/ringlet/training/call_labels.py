"""What the calls of reducers and Zeros are for. Ranks on `ringlet` compare it, and their error names it."""

from __future__ import annotations

import itertools

import torch

from ringlet._C import make_call_labels as make_call_labels
from ringlet._C import set_call_label as set_call_label
from ringlet.training.optimizer_steps import StepWatcher, watch_steps

_STEPS = 16  # the label of a call tells steps modulo this


class BucketLabels(StepWatcher):
    """The labels of a reducer's buckets. They tell how often the optimizer has stepped: a rank that has left out a
    backward steps like the others, and its next backward must not be averaged with an earlier one of theirs."""

    def __init__(self, title: str, parameters: list[torch.nn.Parameter]) -> None:
        self._title = title
        self._ids = {id(parameter) for parameter in parameters}
        self._labels: list[list[int]] = []  # by the steps, and by the bucket
        self._steps = 0
        self._row = 0
        watch_steps(self)

    def begin(self, joining: bool = False) -> None:
        """A backward begins. `joining`: ranks without inputs take part, which do not step."""
        self._row = _STEPS if joining else self._steps % _STEPS

    def restart(self) -> None:
        """All ranks have the same parameters again, whatever their numbers of steps."""
        self._steps = 0

    def lay_out(self, buckets: int) -> None:
        """There are so many buckets from now on."""
        counts = [*(f", {steps} optimizer steps (modulo {_STEPS})" for steps in range(_STEPS)), ""]
        labels = iter(make_call_labels([f"bucket {b} of {self._title}{c}" for c in counts for b in range(buckets)]))
        self._labels = [list(itertools.islice(labels, buckets)) for _ in counts]

    def of(self, place: int) -> int:
        """The label of bucket number `place`."""
        return self._labels[self._row][place]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
