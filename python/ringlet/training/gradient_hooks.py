"""Hooks on gradients that do not keep their owner alive, and on a module's forward that its copies do not have.

A parameter's hooks are out of the garbage collector's sight: an owner that they hold and that holds the parameter would
never be freed, nor its group's connections. So they refer to it weakly; the module's own hooks, which it does see, are
what keeps an owner as long as its module.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ringlet.errors import InvalidUsage


def on_gradient(parameter: torch.nn.Parameter, method: Callable[..., None], *arguments: Any) -> Any:
    """Calls the bound `method(*arguments)` whenever the gradient has arrived in `.grad`; returns the hook's handle.

    `arguments` must not lead to the parameter. A gradient that arrives when the method's object is gone raises
    InvalidUsage: it would be this rank's alone.
    """
    owner = weakref.WeakMethod(method)

    def arrived(parameter: torch.Tensor) -> None:
        called = owner()
        if called is None:
            raise InvalidUsage(
                f"a gradient of shape {list(parameter.shape)} arrived whose reducer is gone, and would not be reduced: "
                "keep the module that was given to GradientReducer or Zero, or the reducer itself, or call its "
                "remove() first"
            )
        called(*arguments)

    arrived.owner = owner  # type: ignore[attr-defined]
    return parameter.register_post_accumulate_grad_hook(arrived)


def owner_of(parameter: torch.Tensor) -> Any:
    """Whose method `on_gradient` calls for this parameter, or None."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    methods = [hook.owner() for hook in hooks.values() if hasattr(hook, "owner")]
    return next((method.__self__ for method in methods if method is not None), None)


def refuse_owned(parameters: Iterable[tuple[str, torch.Tensor]], who: str) -> None:
    """Raises InvalidUsage where `on_gradient` has an owner's hook on one of (name, parameter) already."""
    for name, parameter in parameters:
        if owner_of(parameter) is not None:
            raise InvalidUsage(
                f"{who}: gradients of {name} are reduced by another GradientReducer or Zero already, and would be "
                "averaged twice: call remove() of that one first, or give this one a module without its parameters"
            )


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@functools.cache
def _untraced_call() -> Callable[..., Any]:
    # not made when this is imported: it takes a second, which the first optimizer of torch's takes too
    return torch.compiler.disable(_call, reason="hooks of GradientReducer and Zero communicate")


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as code under torch.compile calls it: not compiled."""
    return functools.partial(_untraced_call(), function)


def _nothing(*_arguments: Any) -> None:
    pass


class ForwardHook(functools.partial[None]):
    """`function` as a hook on a module's forward, untraced.

    In a copy of the module, and in one loaded from a file, it does nothing: what is copied is the module by itself.
    """

    def __new__(cls, function: Callable[..., None]) -> ForwardHook:
        return super().__new__(cls, _untraced_call(), function)

    def __reduce__(self) -> Any:
        return ForwardHook, (_nothing,)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output, in containers and dataclasses, where DDP finds them too."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
