"""The errors of a reducer and a Zero about a module or a backward, in the same words. `who` is the class; each message
names the parameter."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringlet.errors import InvalidUsage
from ringlet.group import process_group_of

from . import replicas
from .gradient_hooks import owner_of

SHOWN = 10  # names in a message
Named = Iterable[tuple[str, torch.Tensor]]


def group_of(module: Any, group: Any, who: str) -> dist.ProcessGroup:
    """The group to train `module` in: the given one, or the whole world."""
    if not isinstance(module, nn.Module):
        raise InvalidUsage(f"{who}: module is a {type(module).__name__}, not a torch.nn.Module")
    return process_group_of(group, who)


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter that has values."""
    return next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))


def refuse_module(
    module: nn.Module, named: Sequence[tuple[str, torch.Tensor]], who: str, *others: type[nn.Module]
) -> None:
    """Raises InvalidUsage for what neither a reducer nor a Zero can train. `others`: as for `wrapped`."""
    for name, parameter in named:
        if owner_of(parameter) is not None:
            raise InvalidUsage(
                f"{who}: another GradientReducer or Zero reduces the gradient of {name} already: call remove() of that "
                f"one first, or give this {who} a module without this parameter"
            )
    trained = {id(parameter) for _, parameter in named if parameter.requires_grad}
    wrong = wrapped(module, trained, who, *others)
    if wrong is not None:
        raise InvalidUsage(wrong)
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and id(child.weight) in trained:
            raise InvalidUsage(f"{who}: {name or 'the module'} makes sparse gradients: make it with sparse=False")
    refuse_scripted([module], who, "put it into a module, as torch.nn.Sequential(module)")
    if not trained:
        raise InvalidUsage(f"{who}: no parameter of {type(module).__name__} requires a gradient")
    for name, parameter in named:
        dtype = getattr(parameter, "grad_dtype", None)  # torch has had it since 2.10; None: any
        if dtype not in (None, parameter.dtype) and not nn.parameter.is_lazy(parameter):
            raise InvalidUsage(
                f"{who}: the grad_dtype of {name} is {dtype}, and {who} takes gradients in the parameter's dtype: set "
                f"grad_dtype = {parameter.dtype}"
            )


def refuse_scripted(modules: Iterable[nn.Module], who: str, instead: str) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise InvalidUsage(f"{who} needs hooks on the forward, and torch.jit.ScriptModule runs none: {instead}")


# FSDP, fully_shard() and replicate(). Other classes of torch.distributed reduce nothing, such as that of activation
# checkpoints.
_REDUCE = ("torch.distributed.fsdp", "torch.distributed._composable.replicate")


def wrapped(module: nn.Module, trained: Container[int], who: str, *others: type[nn.Module]) -> str | None:
    """The error text if a module in it reduces gradients of `trained` parameters (their ids) itself: DDP, `others`, or
    a module that torch.distributed has wrapped."""
    for name, child in module.named_modules():
        theirs = any(c.__module__.startswith(_REDUCE) for c in type(child).__mro__)
        if not theirs and not isinstance(child, (DistributedDataParallel, *others)):
            continue
        if any(id(parameter) in trained for parameter in child.parameters()):
            kind = type(child).__name__
            return (
                f"{who}: {name or 'the module'} is a {kind}, which reduces gradients itself: give {who} the plain "
                f"module, or use {kind} without {who}"
            )
    return None


def shared_with_ddp(wrapper: DistributedDataParallel, parameters: Named, who: str) -> str | None:
    """The error text if the DDP, in whose forward this is called, averages some of the parameters. A module inside DDP
    cannot detect it earlier."""
    left_out = getattr(wrapper, "parameters_to_ignore", ())
    theirs = {p for name, p in wrapper.module.named_parameters() if name not in left_out}
    for name, parameter in parameters:
        if parameter in theirs:
            return (
                f"{who}: a DistributedDataParallel around this module averages the gradient of {name} too: train the "
                f"module without DDP, or call remove() of the {who}"
            )
    return None


def without_values(tensor: torch.Tensor) -> str | None:
    """The error text if a tensor has no values to copy to the other ranks, or not in dense memory."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet: run a forward of the lazy module first"
    if tensor.is_meta:
        return "is on the meta device and has no values: initialise the module first (to_empty, then its weights)"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is {tensor.dtype} of layout {tensor.layout}: only dense tensors can be copied to the other ranks"
    return None


def refuse_layout(name: str, layout: torch.layout) -> None:
    """Raises InvalidUsage if the gradient of `name` is not dense."""
    if layout is not torch.strided:
        raise InvalidUsage(f"the gradient of {name} has layout {layout}: only dense gradients can be reduced")


def refuse_again(name: str, unit: str, more: str = "") -> NoReturn:
    """The gradient of `name` has arrived again after its `unit` (bucket, ZeRO's unit) was sent."""
    raise InvalidUsage(
        f"the gradient of {name} arrived again after its {unit} was sent: a backward may reach each parameter only "
        f"once, and reentrant checkpoints that share parameters reach them more often{more}"
    )


def refuse_stopped(rank: int, sent: int, of: int, units: str) -> NoReturn:
    """A backward raised before its end, and `sent` of `of` units had gone out."""
    raise InvalidUsage(
        f"rank {rank}: the previous backward stopped after {sent} of {of} {units} had been sent, so the ranks' calls "
        "no longer match: make a new process group and train on it, or restart"
    )


# --- of a reducer alone


def refuse_unsupported(module: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    refuse_module(module, named, "GradientReducer")
    for name, tensor in (*replicas.parameters_of(module), *replicas.buffers_of(module)):
        wrong = without_values(tensor) or _not_writable(tensor)
        if wrong is not None:
            raise InvalidUsage(
                f"GradientReducer: {name} {wrong}; or add the name to the module's _ddp_params_and_buffers_to_ignore"
            )


def _not_writable(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor that cannot be written in place."""
    if type(tensor).__module__.startswith("torch.distributed."):
        return f"is a {type(tensor).__name__}: each rank must have the whole tensor"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "has elements that share memory (expand()): give the module a clone()"
    return None


def refuse_gradients(wrong: list[tuple[str, torch.nn.Parameter]], of: int, rank: int, static_graph: bool) -> NoReturn:
    """Of `of` parameters, `wrong` got no gradient; with `static_graph`, another number of them than at first."""
    shown = listed([name for name, _ in wrong])
    if static_graph:
        raise InvalidUsage(
            f"rank {rank}: static_graph=True, but {len(wrong)} of {of} parameters got their gradients more or less "
            f"often than in the first reduced backward: {shown}. Use find_unused_parameters=True instead"
        )
    frozen = [name for name, parameter in wrong if not parameter.requires_grad]
    if frozen:
        raise InvalidUsage(
            f"rank {rank}: {len(frozen)} of {of} parameters were frozen after the reducer was made, and got no "
            f"gradient in this backward: {listed(frozen)}. The averages lack this rank's part of them. Make a "
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
        f"of {listed(names)} held values when the window closed: call zero_grad() between windows. (.grad has this "
        "window's averages now.)"
    )


def listed(words: Sequence[str], most: int = SHOWN) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
