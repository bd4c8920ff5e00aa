"""The errors of a reducer about a module or a backward, with the names of the parameters."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ringlet.errors import InvalidUsage
from ringlet.training import replicas
from ringlet.training.refusals import (
    refuse_grad_dtype,
    refuse_owned,
    refuse_scripted,
    refuse_sparse,
    without_values,
    wrapped,
)

SHOWN = 10  # names in a message
WHO = "GradientReducer"


def refuse_optimizer(make_optimizer: Any) -> None:
    if make_optimizer is not None and not callable(make_optimizer):
        kind = type(make_optimizer).__name__
        raise InvalidUsage(
            f"GradientReducer: optimizer_in_backward is a {kind}, not callable: pass a function from a list of "
            "parameters to an optimizer"
        )


def refuse_unsupported(module: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise InvalidUsage(f"GradientReducer: no parameter of {type(module).__name__} requires a gradient")
    refuse_sparse(module, WHO)
    refuse_scripted([module], WHO, "put it into a module, as torch.nn.Sequential(module)")
    wrong = wrapped(module, WHO)
    if wrong is not None:
        raise InvalidUsage(wrong)
    for name, tensor in (*replicas.parameters_of(module), *replicas.buffers_of(module)):
        wrong = without_values(tensor) or _not_writable(tensor)
        if wrong is not None:
            raise InvalidUsage(
                f"GradientReducer: {name} {wrong}; or add the name to the module's _ddp_params_and_buffers_to_ignore"
            )
    refuse_grad_dtype(named, WHO)
    refuse_owned(named, WHO)


def _not_writable(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor that cannot be written in place."""
    if type(tensor).__module__.startswith("torch.distributed."):
        return f"is a {type(tensor).__name__}: each rank must have the whole tensor"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "has elements that share memory (expand()): give the module a clone()"
    return None


def refuse_gradients(wrong: list[tuple[str, torch.nn.Parameter]], of: int, rank: int, static_graph: bool) -> NoReturn:
    """Of `of` parameters, `wrong` got no gradient; with `static_graph`, another number of them than at first."""
    shown = _shown([name for name, _ in wrong])
    if static_graph:
        raise InvalidUsage(
            f"rank {rank}: static_graph=True, but {len(wrong)} of {of} parameters got their gradients more or less "
            f"often than in the first reduced backward: {shown}. Use find_unused_parameters=True instead"
        )
    frozen = [name for name, parameter in wrong if not parameter.requires_grad]
    if frozen:
        raise InvalidUsage(
            f"rank {rank}: {len(frozen)} of {of} parameters were frozen after the reducer was made, and got no "
            f"gradient in this backward: {_shown(frozen)}. The averages lack this rank's part of them. Make a "
            "new GradientReducer after freezing (remove() the old one), or pass find_unused_parameters=True"
        )
    raise InvalidUsage(
        f"rank {rank}: {len(wrong)} of {of} parameters got no gradient in this backward: {shown}. The averages lack "
        "this rank's part of them. Use every parameter in the loss, or freeze these before making the reducer, "
        "or pass find_unused_parameters=True; or a hook has set `.grad` to None"
    )


def refuse_earlier_values(names: list[str]) -> NoReturn:
    raise InvalidUsage(
        f"GradientReducer: with reproducible=True the gradients of a window are no sum with those before it, and .grad "
        f"of {_shown(names)} held values when the window closed: call zero_grad() between windows. (.grad has this "
        "window's averages now.)"
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
