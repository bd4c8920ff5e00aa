"""One backward at a time: how the reducer and ZeRO see it begin, end, or stop before its end.

A backward begins with the gradient of a module's output, not with the first parameter's: with reentrant checkpoints
the first parameter's gradient arrives in a nested backward, which ends earlier. Autograd calls a callback at the end;
if the backward raises, autograd drops the callback.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ringlet.memory import registered_while_alive


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Backward:
    """The backward of one owner that is under way."""

    def __init__(self) -> None:
        self._task: weakref.ref[Any] | None = (
            None  # autograd keeps the callback alive as long as the backward is under way
        )

    @property
    def open(self) -> bool:
        """Whether a backward has begun and has not been closed."""
        return self._task is not None

    @property
    def stopped(self) -> bool:
        """Whether the latest backward raised before its end. The next one must not take its gradients for its own."""
        return self._task is not None and (not in_backward() or self._task() is None)

    def begin(self, end: Callable[[], None]) -> None:
        """Call it once within a backward. Autograd calls `end` when the backward ends."""
        task = functools.partial(end)
        self._task = weakref.ref(task)
        torch.autograd.Variable._execution_engine.queue_callback(task)

    def at_end(self, function: Callable[[], None]) -> None:
        """Calls `function` when this backward ends, also by raising."""
        assert self._task is not None
        weakref.finalize(self._task(), function).atexit = False

    def make_registered(self) -> None:
        """Until this backward ends, also by raising, the CPU tensors that the process makes are registered memory, so
        that peers can read gradients where autograd puts them. Without an effect if the heap is full."""
        assert self._task is not None
        registered_while_alive(self._task())

    def close(self) -> None:
        """Call it at the end of the backward, and when the gradients of a stopped one have been dropped."""
        self._task = None


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
