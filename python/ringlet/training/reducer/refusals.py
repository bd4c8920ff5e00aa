"""What a reducer refuses about a module and about a backward, with the names of the parameters."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringlet.errors import InvalidUsage
from ringlet.training import replicas
from ringlet.training.gradient_hooks import refuse_owned

SHOWN = 10  # names in a message


def refuse_arguments(module: Any, group: Any, make_optimizer: Any) -> None:
    """What has another type than GradientReducer's arguments have, before anything communicates."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidUsage(f"GradientReducer: module is a {type(module).__name__}, not a torch.nn.Module")
    if group is None and not dist.is_initialized():
        raise InvalidUsage("GradientReducer: no process group yet: call torch.distributed.init_process_group() first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidUsage(
            "GradientReducer: this rank is not a member of process_group, and has nothing to reduce in it"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidUsage(
            f"GradientReducer: process_group is a {type(group).__name__}, not a group of torch.distributed "
            "(init_process_group or new_group makes one)"
        )
    if make_optimizer is not None and not callable(make_optimizer):
        kind = type(make_optimizer).__name__
        raise InvalidUsage(
            f"GradientReducer: optimizer_in_backward is a {kind}, not callable: give a function of parameters"
        )


def refuse_unsupported(module: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise InvalidUsage(f"no parameter of {type(module).__name__} requires a gradient: there is nothing to reduce")
    for name, child in module.named_modules():
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse:
            raise InvalidUsage(f"{name or type(child).__name__} makes sparse gradients; make it with sparse=False")
        if _reduces_by_itself(child):
            raise InvalidUsage(
                f"{name or 'the module'} is a {type(child).__name__}, which reduces its gradients itself: give "
                "GradientReducer the plain module, or use that wrapper alone"
            )
    for name, tensor in (*replicas.parameters_of(module), *replicas.buffers_of(module)):
        _refuse_tensor(name, tensor)
    refuse_owned(named, "GradientReducer")


def _reduces_by_itself(module: torch.nn.Module) -> bool:
    """DDP, and what torch.distributed makes of a module: FSDP, fully_shard, replicate."""
    classes = type(module).__mro__
    return DistributedDataParallel in classes or any(c.__module__.startswith("torch.distributed.") for c in classes)


def _refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    """What has no values to copy to the other ranks, or none that can be written in place."""
    wrong = ""
    if torch.nn.parameter.is_lazy(tensor):
        wrong = "has no shape yet: run a forward of the lazy module first"
    elif tensor.is_meta:
        wrong = "is on the meta device and has no values: initialise the module first (to_empty, then its weights)"
    elif type(tensor).__module__.startswith("torch.distributed."):
        wrong = f"is a {type(tensor).__name__}; only what a rank has whole is reduced"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        wrong = f"is {tensor.dtype} of layout {tensor.layout}; only dense tensors are copied to the other ranks"
    elif any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        wrong = "has elements that share memory (expand()): give the module a clone()"
    if wrong:
        raise InvalidUsage(f"{name} {wrong}; or name it in the module's _ddp_params_and_buffers_to_ignore")


def shared_with_ddp(named: list[tuple[str, torch.nn.Parameter]]) -> str | None:
    """Inside the forward of a DistributedDataParallel: what is wrong if that reduces the same gradients."""
    wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[attr-defined]
    if wrapper is None:
        return None
    others = {id(parameter) for parameter in wrapper.parameters()}
    for name, parameter in named:
        if id(parameter) in others:
            return (
                f"the gradient of {name} is averaged by a DistributedDataParallel too, which would leave wrong values: "
                "use one of the two (call remove() of the GradientReducer, or train the module without DDP)"
            )
    return None


def refuse_gradients(wrong: list[tuple[str, torch.nn.Parameter]], of: int, rank: int, static_graph: bool) -> NoReturn:
    """`wrong`, of `of` parameters, got no gradient, or with `static_graph` another number of them than at first."""
    shown = _shown([name for name, _ in wrong])
    if static_graph:
        raise InvalidUsage(
            f"rank {rank}: with static_graph=True {len(wrong)} of {of} parameters got their gradients another "
            f"number of times than in the first reduced backward: {shown}. Use find_unused_parameters=True instead"
        )
    frozen = [name for name, parameter in wrong if not parameter.requires_grad]
    if frozen:
        raise InvalidUsage(
            f"rank {rank}: {len(frozen)} of {of} parameters were frozen after the reducer was made, and got no "
            f"gradient in this backward: {_shown(frozen)}. The averages count nothing from this rank for them. Make a "
            "new GradientReducer after freezing (remove() the old one), or pass find_unused_parameters=True"
        )
    raise InvalidUsage(
        f"rank {rank}: {len(wrong)} of {of} parameters got no gradient in this backward: {shown}. The averages count "
        "nothing from this rank for them. Use every parameter in the loss, or freeze these before making the reducer, "
        "or pass find_unused_parameters=True"
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
