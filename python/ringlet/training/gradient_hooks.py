"""Hooks on gradients that do not keep their owner alive, and on a module's forward that its copies do not have.

The garbage collector does not see a parameter's hooks. If such a hook held an owner that holds the parameter, neither
the owner nor its group's connections would ever be freed. So these hooks refer to the owner weakly. The garbage
collector sees the module's own hooks, and they keep the owner alive as long as the module.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ringlet._C import GradientArrivals, hook_fallback
from ringlet.errors import InvalidUsage

__all__ = ["ForwardHook", "GradientArrivals", "on_gradient", "owner_of", "untraced"]


def on_gradient(
    parameter: torch.nn.Parameter,
    method: Callable[..., None],
    *arguments: Any,
    wrapped: Callable[[Callable[..., None]], Callable[..., None]] | None = None,
) -> Any:
    """Calls the bound `method(*arguments)` whenever the gradient has arrived in `.grad`; returns the hook's handle.

    `arguments` must not lead to the parameter. `wrapped` makes the hook that calls this one when it has to
    (`GradientArrivals.hook`). If a gradient arrives when the method's object is gone, it raises
    InvalidUsage: no other rank would get it.
    """
    owner = weakref.WeakMethod(method)

    def arrived(parameter: torch.Tensor) -> None:
        called = owner()
        if called is None:
            raise InvalidUsage(
                f"a gradient of shape {list(parameter.shape)} arrived, but its GradientReducer or Zero is gone and "
                "cannot reduce it: keep the reducer or its module, or call remove() first"
            )
        called(*arguments)

    arrived.owner = owner  # type: ignore[attr-defined]
    return parameter.register_post_accumulate_grad_hook(arrived if wrapped is None else wrapped(arrived))


def owner_of(parameter: torch.Tensor) -> Any:
    """The object whose method `on_gradient` calls for this parameter, or None."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    ours = [hook_fallback(hook) or hook for hook in hooks.values()]
    methods = [hook.owner() for hook in ours if hasattr(hook, "owner")]
    return next((method.__self__ for method in methods if method is not None), None)


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

    In a copy of the module, or in a module loaded from a file, it does nothing: a copy is the module by itself.
    """

    def __new__(cls, function: Callable[..., None]) -> ForwardHook:
        return super().__new__(cls, _untraced_call(), function)

    def __reduce__(self) -> Any:
        return ForwardHook, (_nothing,)
