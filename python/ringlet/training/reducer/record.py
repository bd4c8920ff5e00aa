"""The record of one backward of a reducer: made at its begin, dropped at its end; with delay, when given over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringlet.training.backward import Backward

from .flat_gradients import FlatBucket, FlatGradients, Gradient
from .timeline import BucketTimes, Timeline, now_ns


@dataclass(eq=False)
class BucketState:
    """One bucket in one backward. `in_place`: every gradient is reduced by itself, where autograd has put it.
    `scaled`: tensors to multiply by a factor when they are reduced."""

    bucket: FlatBucket
    in_place: bool
    times: BucketTimes
    work: Any = None
    scaled: tuple[list[torch.Tensor], float] | None = None

    def wait(self) -> None:
        self.work.wait()
        if self.scaled is not None:
            torch._foreach_mul_(*self.scaled)
            self.scaled = None

    def mark_done(self, _future: Any = None) -> None:
        """Counts once: the backend may report it a moment after the wait for it was over."""
        self.times.done_ns = self.times.done_ns or now_ns()


class ReducerBackward(Backward):
    """`late`: all buckets are sent at its end. `scale` multiplies this rank's gradients before they are averaged.

    Of parameter i: `used[i]`, whether its gradient arrived since the last reduction; `own[i]`, the tensor that
    autograd has made, if it is reduced there; `users[i]`, a view of somebody else's buffer that was in `.grad`, to
    which averages go; `times[i]`, how often its gradient arrived. `filled`: of gradients that did not arrive, what
    their places held before, if that is to be put back where no rank has one.
    """

    def __init__(
        self,
        end: Callable[[], None] | None,
        reducing: bool,
        flat: FlatGradients,
        states: list[BucketState],
        waiting: list[int],
        used: bytearray,
    ) -> None:
        super().__init__(end, reducing, waiting)
        count = len(flat.gradients)
        self.flat, self.states, self.used = flat, states, used
        self.timeline = Timeline(now_ns(), buckets=[state.times for state in states])
        self.late, self.scale = False, 1.0
        self.own: list[torch.Tensor | None] = [None] * count
        self.users: list[torch.Tensor | None] = [None] * count
        self.times = [0] * count
        self.filled: dict[int, torch.Tensor | None] = {}
        self.aside: list[tuple[Gradient, torch.Tensor]] = []  # reproducible: what was in `.grad`
        self.stepped: set[int] = set()  # the parameters that an optimizer in backward has updated
        self.earlier: list[int] = []  # the parameters of which that was not zero when the window closed

    @property
    def in_place(self) -> bool:
        return all(state.in_place for state in self.states)

    def tensors(self, bucket: FlatBucket) -> list[torch.Tensor]:
        """What is reduced if every gradient is a message of its own: contiguous, and the gradients' memory."""
        owned = [(gradient, self.own[gradient.index]) for gradient in bucket.members]
        return [own if own is not None and gradient.is_flat else gradient.flat(own) for gradient, own in owned]

    def give(self, gradients: Iterable[Gradient], used: Sequence[int], views: bool = True) -> None:
        """Puts averages into `.grad` of `used` parameters; `views` of the buckets, or copies."""
        for gradient in gradients:
            index, parameter = gradient.index, gradient.parameter
            own, users = self.own[index], self.users[index]
            if own is not None and users is None:
                if parameter.grad is not own:  # a hook of the user's has exchanged it
                    parameter.grad = own
            elif not used[index]:
                before = self.filled.get(index)
                if before is not None:
                    gradient.view.copy_(before)
            elif users is not None:
                parameter.grad = users.copy_(gradient.view if own is None else own)
            elif views:
                gradient.hand_over()
            else:
                gradient.copy_out()

    def put_back(self) -> None:
        """Reproducible: gives `.grad` back what was in it, where nothing has arrived."""
        for gradient, before in self.aside:
            if gradient.parameter.grad is None:
                gradient.parameter.grad = before
        self.aside.clear()
