"""The errors of both the reducer and ZeRO, in the same words. `who` is the class; each message names the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringlet.errors import InvalidUsage
from ringlet.group import process_group_of

from .gradient_hooks import owner_of

Named = Iterable[tuple[str, torch.Tensor]]


def group_of(module: Any, group: Any, who: str) -> dist.ProcessGroup:
    """The group to train `module` in: the given one, or the whole world."""
    if not isinstance(module, nn.Module):
        raise InvalidUsage(f"{who}: module is a {type(module).__name__}, not a torch.nn.Module")
    return process_group_of(group, who)


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter that has values."""
    return next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))


def refuse_owned(parameters: Named, who: str) -> None:
    """Raises InvalidUsage if a parameter has another owner's hook of `on_gradient`."""
    for name, parameter in parameters:
        if owner_of(parameter) is not None:
            raise InvalidUsage(
                f"{who}: another GradientReducer or Zero reduces the gradient of {name} already: call remove() of that "
                f"one first, or give this {who} a module without this parameter"
            )


def refuse_sparse(module: nn.Module, who: str) -> None:
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise InvalidUsage(f"{who}: {name or 'the module'} makes sparse gradients: make it with sparse=False")


def refuse_grad_dtype(parameters: Named, who: str) -> None:
    for name, parameter in parameters:
        dtype = getattr(parameter, "grad_dtype", None)  # torch has had it since 2.10; None: any
        if dtype not in (None, parameter.dtype):
            raise InvalidUsage(
                f"{who}: the grad_dtype of {name} is {dtype}, and {who} takes gradients in the parameter's dtype: set "
                f"grad_dtype = {parameter.dtype}"
            )


def refuse_scripted(modules: Iterable[nn.Module], who: str, instead: str) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise InvalidUsage(f"{who} needs hooks on the forward, and torch.jit.ScriptModule runs none: {instead}")


def wrapped(module: nn.Module, who: str, *others: type[nn.Module]) -> str | None:
    """The error text if a module in it reduces gradients itself: DDP, `others`, or a module that torch.distributed has
    wrapped (FSDP, fully_shard, replicate)."""
    for name, child in module.named_modules():
        theirs = any(c.__module__.startswith("torch.distributed.") for c in type(child).__mro__)
        if theirs or isinstance(child, (DistributedDataParallel, *others)):
            kind = type(child).__name__
            return (
                f"{who}: {name or 'the module'} is a {kind}, which reduces gradients itself: give {who} the plain "
                f"module, or use {kind} without {who}"
            )
    return None


def shared_with_ddp(parameters: Named, who: str) -> str | None:
    """Inside the forward of a DistributedDataParallel: the error text if DDP averages some of the parameters. A module
    inside DDP cannot detect it earlier."""
    wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[attr-defined]
    if wrapper is None:
        return None
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
