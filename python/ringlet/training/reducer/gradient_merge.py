"""Gradient merge: one reduction for every k micro-batches, counted here and not by the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringlet.errors import InvalidUsage
from ringlet.training.agree import Numbers
from ringlet.training.optimizer_steps import Arguments, StepWatcher, watch_no_more, watch_steps
from ringlet.training.reproducible import TreeSums, is_power_of_two, numbers_of, refuse_k
from ringlet.training.window import Window


class GradientMerge(Window, StepWatcher):
    """The result of `GradientReducer.accumulate(k)`: counts windows of `k` micro-batches, one backward each.

        merge = reducer.accumulate(4)
        for inputs, targets in batches:
            loss_of(model, inputs, targets).backward()
            if merge.complete:
                optimizer.step()
                optimizer.zero_grad()
        if merge.finish():  # a last window of fewer than 4
            optimizer.step()
            optimizer.zero_grad()

    `seen` is the number of micro-batches in the window under way. Their gradients are not reduced yet. While a window
    is open, an `optimizer.step()` on the module's parameters and a forward after `zero_grad(set_to_none=True)` raise
    InvalidUsage. `drop()` gives a window up.
    """

    def __init__(
        self,
        k: int,
        average: bool,
        parameters: list[torch.nn.Parameter],
        group: dist.ProcessGroup,
        finish: Callable[[], bool],
        dropped: Callable[[], None],
        tree: TreeSums | None,
    ) -> None:
        if not isinstance(k, int) or k < 1:
            raise InvalidUsage(f"accumulate: k must be a number of micro-batches from 1 on, got {k!r}")
        if tree is not None:
            refuse_k(k, average, "accumulate()")
        super().__init__(k, group, parameters[0].device)
        self.average, self._tree = average, tree
        self._complete = self._removed = False
        self._opened = False  # there may be gradients of a window that is not closed, or not well
        self._finish, self._dropped = finish, dropped
        self._parameters = parameters
        self._ids = {id(parameter) for parameter in parameters}
        self._counts: Numbers | None = None
        watch_steps(self)

    def __repr__(self) -> str:
        state = "complete" if self._complete else f"{self.seen} of {self.k} micro-batches seen"
        return f"GradientMerge(k={self.k}, average={self.average}, {state})"

    @property
    def micro_batches(self) -> range:
        """The numbers of this rank's micro-batches in a window, of the `k` times world of all ranks, in order.

        With `reproducible=True` training depends on the micro-batches in the order of these numbers, and not on the
        number of ranks.
        """
        return numbers_of(dist.get_rank(self._group), dist.get_world_size(self._group), self.k, by_rank=True)

    @property
    def complete(self) -> bool:
        """Whether the latest backward closed a window: gradients are averages over ranks, the optimizer may step."""
        return self._complete

    def finish(self) -> bool:
        """Closes a window of fewer than `k` micro-batches, at the end of an epoch. Collective.

        Returns whether there was one. If so, gradients are averages as with `complete`, divided by the real number of
        micro-batches. Raises InvalidUsage on every rank if ranks have different numbers of micro-batches; after the
        reducer's `remove()`. With `reproducible=True` it drops a window that has no power of two of micro-batches, and
        raises InvalidUsage.
        """
        return self._finish()

    def drop(self) -> None:
        """Gives up the window under way, such as after an exception in the training loop: forgets its micro-batches and
        sets the parameters' `.grad` to None. The next backward opens a window. Call it on every rank. Without an open
        window it does nothing.

        Raises InvalidUsage if a backward stopped after it had sent gradients: the group cannot go on; and if a later
        `accumulate` has replaced this one.
        """
        if self._removed:
            raise InvalidUsage("drop() of a window that a later accumulate(), or remove(), has replaced")
        if not self._opened:
            return
        self._opened = False
        self.forget()
        for parameter in self._parameters:
            parameter.grad = None
        self._dropped()

    # -- for the reducer --

    @property
    def closes(self) -> bool:
        """Whether the backward that is starting now is the last of its window."""
        return self.seen + 1 == self.k

    def begin(self) -> float:
        """A backward's first gradient has arrived. (torch.autograd.grad alone does not open a window.) Returns the
        factor for the gradients if they are reduced."""
        self._complete, self._opened = False, True
        return self._gather(self.seen + 1) if self.closes else 1.0

    def _gather(self, seen: int) -> float:
        if self._counts is None:
            self._counts = self.compare(seen)
        return 1 / seen if self.average and seen else 1.0

    def begin_finish(self) -> float | None:
        """The factor for the gradients of a window that is not full; None if no rank has one."""
        scale = self._gather(self.seen)
        assert self._counts is not None
        counts = self._counts.wait()
        if not any(counts):
            self._counts = None
            return None
        self._complete, self._opened = False, True
        if self._tree is not None and not all(map(is_power_of_two, counts)):
            told = self.told()
            self.forget()
            raise InvalidUsage(
                f"finish() {told}, no power of two: with reproducible=True the window is dropped: end an epoch with a "
                "window of a power of two of micro-batches"
            )
        return scale

    def close(self) -> Numbers:
        """The window is over. Returns what `closed` takes when its gradients are reduced."""
        counts, self._counts, self.seen = self._counts, None, 0
        assert counts is not None
        return counts

    def closed(self, counts: Numbers) -> None:
        """Raises InvalidUsage if ranks had different numbers of micro-batches."""
        self.refuse_unequal(counts.wait(), "These gradients are wrong: drop them")
        self._complete, self._opened = True, False

    def spoil(self) -> None:
        """The gradients of a window that has closed are not right on this rank."""
        self._complete, self._opened = False, True

    def check_gradients(self) -> None:
        """Before a forward. Raises InvalidUsage if gradients of the window under way were thrown away."""
        if self._tree is None and self.seen and all(p.grad is None for p in self._parameters):
            raise InvalidUsage(
                f"zero_grad() {self.told()} dropped their gradients: call zero_grad() only if merge.complete or "
                "finish() is True, and merge.drop(), on every rank, to give a window up"
            )

    def check_closed(self, what: str) -> None:
        if self.seen:
            raise InvalidUsage(
                f"{what} {self.told()}: their gradients are not reduced yet: call finish() or drop() first"
            )

    def abandon(self, arrived: bool) -> None:
        """A backward stopped half-way. Raises InvalidUsage if some of its gradients are in `.grad` already, and
        zero_grad() has not dropped them. With reproducible sums, which have none of it, drops the window and says so.
        """
        if not self._opened:  # or drop() has given it up
            return
        stopped = f"the previous backward stopped in micro-batch {self.seen + 1} of a window of {self.k}"
        if self._tree is not None and (arrived or self.seen):
            self.forget()
            raise InvalidUsage(f"{stopped}, which is dropped on this rank: the next backward opens a window")
        if arrived:
            self.forget()
            if any(p.grad is not None and bool(p.grad.any()) for p in self._parameters):
                raise InvalidUsage(
                    f"{stopped} after it had added some of its gradients: call zero_grad() on every rank; the next "
                    "backward opens a window"
                )

    def forget(self) -> None:
        """The window under way is lost."""
        self._counts, self.seen, self._complete = None, 0, False
        if self._tree is not None:
            self._tree.forget()

    def remove(self) -> None:
        self._removed = True
        watch_no_more(self)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Before an optimizer's step: refuses one on gradients that are not reduced, also if its closure makes them."""
        if not any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            return None
        if self._counts is None:  # else an optimizer in backward steps as the window closes
            self.check_closed("optimizer.step()")
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def checked() -> Any:
            loss = closure()
            self.check_closed("the closure of optimizer.step()")
            return loss

        return (
            (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)
        )
