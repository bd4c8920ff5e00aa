"""Released parameters: stage 3 keeps them in shards while no module uses them.

A released parameter keeps its identity, shape, dtype and gradient. Every read of its values raises an error, because a
silent zero or an old value would train a wrong model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ringlet.errors import InvalidUsage
from ringlet.training.backward import in_backward

_READ = "shape dtype device layout requires_grad grad is_leaf ndim grad_fn is_cuda is_meta _post_accumulate_grad_hooks"
_METHODS = (
    "size dim numel nelement element_size stride is_floating_point is_complex __hash__ __len__ "
    "register_hook register_post_accumulate_grad_hook requires_grad_"
)
_ALLOWED = {getattr(torch.Tensor, name).__get__ for name in _READ.split()}
_ALLOWED |= {getattr(torch.Tensor, name) for name in _METHODS.split()}
_ALLOWED |= {torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__}  # type: ignore[union-attr]
_ALLOWED |= {torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


class Released(nn.Parameter):
    """The class of a parameter while its values are in shards."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ALLOWED:
            read = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Released)), None)
            name = "?" if read is None else read.__dict__.get("ringlet_name")
            whole = "persistence_elements so large" if read is None else f"persistence_elements={read.numel()} or more"
            called = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", func)
            hint = (
                "Leave out inputs= and freeze the other parameters, or use stage 1 or 2"
                if func is torch.autograd.backward
                else "An activation checkpoint inside that forward recomputes part of it: put it around whole modules"
                if in_backward() and torch.is_grad_enabled()
                else f"Call that module, pass {whole}, which keeps the parameter whole on every rank, or make "
                "bucket_elements so large that the module which reads it is one unit (the outermost module never is). "
                "Outside of a training forward use `with zero.gathered():`"
            )
            raise InvalidUsage(
                f"{called} on parameter {name}, whose values are in shards: stage 3 gathers a parameter only "
                f"during its own module's forward. {hint}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = list(self.shape)
        return f"Parameter {self.__dict__.get('ringlet_name')} of shape {shape}, {self.dtype}, held in shards"


def release(parameter: nn.Parameter, name: str, shape: torch.Size) -> None:
    """Takes the values away. The shape stays, because autograd checks it when the gradient arrives."""
    parameter.__class__ = nn.Parameter
    value = float("nan") if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    with torch.inference_mode(False):  # else it would stay an inference tensor, which cannot be trained
        nothing = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(shape)
    parameter.__dict__["ringlet_name"] = name
    parameter.__class__ = Released


def restore(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Gives the parameter `values`, of its shape and dtype."""
    parameter.__class__ = nn.Parameter
    with torch.inference_mode(False):
        parameter.data = values
