"""Hooks on gradients that do not keep their owner alive, and on a module's forward that its copies do not have.

The garbage collector does not see a parameter's hooks. If such a hook held an owner that holds the parameter, neither
the owner nor its group's connections would ever be freed. So these hooks refer to the owner weakly. The garbage
collector sees the module's own hooks, and they keep the owner alive as long as the module.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ringlet._C import GradientArrivals as GradientArrivals
from ringlet._C import hook_fallback
from ringlet._C import storage_owners as storage_owners
from ringlet.errors import InvalidUsage
from ringlet.untraced import keep_untraced


def on_gradient(
    parameter: torch.nn.Parameter,
    method: Callable[..., None],
    *arguments: Any,
    wrapped: Callable[[Callable[..., None]], Callable[..., None]] | None = None,
) -> Any:
    """Calls the bound `method(*arguments)`, under no_grad(), whenever the gradient has arrived in `.grad`; returns the
    hook's handle.

    `arguments` must not lead to the parameter. `wrapped` makes the hook that calls this one when it has to
    (`GradientArrivals.hook`). If a gradient arrives when the method's object is gone, it raises
    InvalidUsage: no other rank would get it.
    """
    arrived = _Arrival(method, arguments)
    return parameter.register_post_accumulate_grad_hook(arrived if wrapped is None else wrapped(arrived))


class _Arrival:
    """A hook of `on_gradient`. `method`: a weak reference."""

    def __init__(self, method: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.method: weakref.WeakMethod[Any] = weakref.WeakMethod(method)
        self._arguments = arguments

    def __call__(self, parameter: torch.Tensor) -> None:
        called = self.method()
        if called is None:
            raise InvalidUsage(
                f"a gradient of shape {list(parameter.shape)} arrived, but its GradientReducer or Zero is gone and "
                "cannot reduce it: keep the reducer or its module, or call remove() first"
            )
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                called(*self._arguments)
        else:
            called(*self._arguments)


class HooksLast:
    """Keeps hooks of `on_gradient` behind all others of their parameters: what another hook does to a gradient belongs
    to it, whenever that hook was registered."""

    def __init__(self) -> None:
        self._hooks: list[tuple[dict[int, Any], int]] = []

    def add(self, parameter: torch.Tensor, handle: Any) -> None:
        hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        self._hooks.append((hooks, handle.id))

    def keep(self) -> None:
        """Call it before gradients arrive."""
        for hooks, ours in self._hooks:
            if len(hooks) > 1 and next(reversed(hooks)) != ours and ours in hooks:
                hooks[ours] = hooks.pop(ours)  # autograd goes by the dict's own order, which move_to_end() leaves


@functools.cache
def own_memory() -> int:
    """The number of tensors that have a gradient's memory, in a hook of `on_gradient`, if nothing else uses it. It
    depends on the version of torch."""
    found: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(2, device="cpu", requires_grad=True)
        leaf.register_post_accumulate_grad_hook(lambda leaf: found.append(storage_owners(leaf.grad)))
        (leaf * 2).sum().backward()
    return found[0]


def has_own_memory(gradient: torch.Tensor) -> bool:
    """Whether nothing else uses the memory of a gradient that arrives. Autograd takes a gradient as it is, even if it
    is a view of one that still flows through the backward, or of another parameter's gradient."""
    return storage_owners(gradient) <= own_memory()


def owner_of(parameter: torch.Tensor) -> Any:
    """The object whose method `on_gradient` calls for this parameter, or None."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    ours = [hook_fallback(hook) or hook for hook in hooks.values()]
    methods = [hook.method() for hook in ours if isinstance(hook, _Arrival)]
    return next((method.__self__ for method in methods if method is not None), None)


def beside_modes(function: Callable[..., Any], *arguments: Any) -> Any:
    if torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0:
        return function(*arguments)
    # The modes of the program, such as a selective checkpoint's, are about its operations, and not about these.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return function(*arguments)


class ForwardHook(functools.partial[None]):
    """`function` as a hook on a module's forward.

    In a copy of the module, or in a module loaded from a file, it does nothing: a copy is the module by itself.
    """

    def __new__(cls, function: Callable[..., None]) -> ForwardHook:
        keep_untraced()
        return super().__new__(cls, beside_modes, function)

    def __reduce__(self) -> Any:
        # a call without an effect, whatever its arguments, that is read without ringlet
        return getattr, (contextlib.nullcontext(), "__exit__")
