"""How a reducer and a Zero see the backwards of their module. Each is a machine of three states:

    idle --begin--> filling --end--> closing --> idle
                       |
                       +--raises--> stopped --abandon--> idle

A backward begins with the gradient of a module's output, not with the first parameter's: with reentrant checkpoints
the first parameter's gradient arrives in a nested backward, which ends earlier. Autograd calls a callback at the end;
if the backward raises, autograd drops the callback, and the next call of the trainer abandons what had arrived.
All that belongs to one backward is in one record, made at its begin and dropped at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ringlet.errors import InvalidUsage
from ringlet.memory import registered_while_alive

from .gradient_hooks import ForwardHook, HooksLast, on_gradient


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Launches:
    """The parts of a backward (a reducer's buckets, a Zero's units), which all ranks send in one order, whatever the
    order in which their gradients arrive: part i of it lacks `waiting[i]` gradients, and the first `sent` are under
    way."""

    def __init__(self, waiting: list[int]) -> None:
        self.waiting = waiting
        self.sent = 0

    def is_full(self, part: int) -> bool:
        """Whether the part may be sent as far as gradients are concerned: those before it are full, too."""
        return all(missing <= 0 for missing in self.waiting[: part + 1])

    def next(self) -> int | None:
        """The part that is to be sent now, if there is one. It counts as sent."""
        if self.sent == len(self.waiting) or self.waiting[self.sent] > 0:
            return None
        self.sent += 1
        return self.sent - 1

    def fill(self) -> None:
        """The backward has ended: what has not arrived will not."""
        self.waiting = [0] * len(self.waiting)


class Backward:
    """The record of one backward. Autograd calls `end` when the backward ends. None: it has no backward of autograd's,
    and whoever made it ends it. `reducing`: it ends with gradients that are averages over ranks."""

    def __init__(self, end: Callable[[], None] | None, reducing: bool, waiting: list[int]) -> None:
        self.reducing, self.launches = reducing, Launches(waiting)
        self._task: weakref.ref[Any] | None = None
        if end is not None:
            task = functools.partial(end)
            self._task = weakref.ref(task)  # autograd keeps the callback alive as long as the backward is under way
            torch.autograd.Variable._execution_engine.queue_callback(task)

    @property
    def of_autograd(self) -> bool:
        return self._task is not None

    @property
    def stopped(self) -> bool:
        """Whether the backward raised before its end. The next one must not take its gradients for its own."""
        return self._task is not None and (torch._C._current_graph_task_id() == -1 or self._task() is None)

    def at_end(self, function: Callable[[], None]) -> None:
        """Calls `function` when the backward ends, also by raising."""
        if self._task is not None:
            weakref.finalize(self._task(), function).atexit = False

    def make_registered(self) -> None:
        """Until the backward ends, also by raising, the CPU tensors that the process makes are registered memory, so
        that peers can read gradients where autograd puts them. Without an effect if the heap is full."""
        if self._task is not None:
            registered_while_alive(self._task())


Record = TypeVar("Record", bound=Backward)


class Trainer(Generic[Record]):
    """What a GradientReducer and a Zero have in common: hooks on a module, and its backwards.

    A subclass says what happens: `_enter` and `_leave` of a forward; `_begin`, `_take` of a gradient, `_close` and
    `_abandon` of a backward. `_record`: of the backward under way, or of one that stopped.
    """

    _noun: str  # in errors
    _record: Record | None = None

    def _attach(
        self,
        module: torch.nn.Module,
        parameters: list[torch.nn.Parameter],
        wrapped: Callable[..., Any] | None = None,
        **forward: Any,
    ) -> None:
        """`wrapped`: makes the hook of parameter i from i and the hook that calls Python. `forward`: options of the
        hook behind a forward."""
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(ForwardHook(self._before_forward), prepend=bool(forward)),
            module.register_forward_hook(ForwardHook(self._after_forward), **forward),
        ]
        self._last = HooksLast()
        self._attached = module
        for index, parameter in enumerate(parameters):
            hook = None if wrapped is None else functools.partial(wrapped, index)
            self._hooks.append(on_gradient(parameter, self._take, index, wrapped=hook))
            self._last.add(parameter, self._hooks[-1])

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _check_attached(self, call: str) -> None:
        if not self._hooks:
            raise InvalidUsage(f"{call}: the {self._noun} was removed: make a new one")

    def _before_forward(self, called: torch.nn.Module, _inputs: Any) -> None:
        if called is self._attached and self._sees_forward():  # copy.copy(module) shares its hooks
            self._check_stopped()
            self._enter()

    def _after_forward(self, called: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if called is self._attached and self._sees_forward():
            roots = differentiable(output)
            context = self._leave(bool(roots))

            def begin(_gradient: torch.Tensor) -> None:
                self._open(None, context)

            for tensor in roots:
                tensor.register_hook(begin)

    def _open(self, arrived: int | None, context: Any) -> Record:
        """The record of the backward under way. `arrived`: the parameter of which a gradient of this backward has
        arrived. `context`: what `_leave` of its forward returned."""
        record = self._record
        if record is None or record.stopped:
            self._check_stopped(arrived)
            self._last.keep()
            self._record = record = self._begin(arrived, context)
        return record

    def _on_end(self) -> None:
        assert self._record is not None
        try:
            with torch.no_grad():
                self._close(self._record)
        finally:
            self._idle()

    def _check_stopped(self, arrived: int | None = None) -> None:
        """Drops the gradients of a backward that raised before its end. Call it before anything that would use them."""
        if self._record is not None and self._record.stopped:
            try:
                self._abandon(self._record, arrived)
            finally:
                self._idle()

    def _idle(self) -> None:
        self._record = None

    def _sees_forward(self) -> bool:
        raise NotImplementedError

    def _enter(self) -> None:
        raise NotImplementedError

    def _leave(self, has_roots: bool) -> Any:
        """`has_roots`: whether a backward can come from the output."""
        raise NotImplementedError

    def _begin(self, arrived: int | None, context: Any) -> Record:
        raise NotImplementedError

    def _take(self, index: int) -> None:
        """The gradient of parameter `index` has arrived in `.grad`."""
        raise NotImplementedError

    def _close(self, record: Record) -> None:
        raise NotImplementedError

    def _abandon(self, record: Record, arrived: int | None) -> None:
        """The backward of `record` raised. `arrived`: as for `_open`, of the next one."""
        raise NotImplementedError


def differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors of a module's output from which a backward can come. Like DDP, finds them in containers and
    dataclasses."""
    return [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors_in(getattr(leaf, field.name, None))
