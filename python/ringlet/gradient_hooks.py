"""Hooks on gradients that do not keep their owner alive.

A parameter's hooks are out of the garbage collector's sight: an owner that they hold and that holds the parameter would
never be freed, nor its group's connections. So they refer to it weakly; the module's own hooks, which it does see, are
what keeps an owner as long as its module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .errors import InvalidUsage


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

    return parameter.register_post_accumulate_grad_hook(arrived)
