"""What a Zero refuses about its arguments and its module, before anything moves, with the names of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.training.gradient_hooks import refuse_owned
from ringlet.training.replicas import refuse_together

from .optimizer import MakeOptimizer, OptionsBy, OptionsOf
from .options import COMPUTE, Options


def group_of(module: Any, group: Any) -> dist.ProcessGroup:
    """The group to train `module` in: the given one, or the whole world."""
    if not isinstance(module, nn.Module):
        raise InvalidUsage(f"Zero: module is a {type(module).__name__}, not a torch.nn.Module")
    if group is None:
        if not dist.is_initialized():
            raise InvalidUsage("Zero: no process group yet: call torch.distributed.init_process_group() first")
        return dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidUsage("Zero: this rank is not a member of process_group: make a Zero on its members alone")
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidUsage(
            f"Zero: process_group is a {type(group).__name__}, not a group of torch.distributed (new_group makes one)"
        )
    return group


@contextmanager
def refusing_alike(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """What is refused inside is refused on all ranks, also where it is wrong on some alone."""
    try:
        yield
    except InvalidUsage as error:
        device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
        refuse_together(str(error), group, device)


def refuse_unsupported(module: nn.Module, options: Options) -> None:
    named = list(module.named_parameters())
    refuse_owned(named, "Zero")
    wrong = wrapped(module)
    if wrong is not None:
        raise InvalidUsage(wrong)
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise InvalidUsage(f"{name or 'module'} makes sparse gradients; make it with sparse=False")
    if not any(p.requires_grad for _, p in named):
        raise InvalidUsage(f"no parameter of {type(module).__name__} requires a gradient: there is nothing to train")
    for name, p in named:
        _refuse_parameter(f"parameter {name} ", p, options)
    for name, buffer in module.named_buffers():
        what = f"buffer {name} "
        if nn.parameter.is_lazy(buffer):
            raise InvalidUsage(what + "has no shape yet: run a forward of the lazy module first")
        if buffer.is_meta:
            raise InvalidUsage(what + "is on the meta device and has no values: initialise the module first")
        if buffer.layout is not torch.strided or buffer.is_quantized:
            raise InvalidUsage(
                what + f"is {buffer.dtype} of layout {buffer.layout}; only dense ones are copied to the other ranks"
            )


def _refuse_parameter(what: str, p: nn.Parameter, options: Options) -> None:
    if type(p) is not nn.Parameter:
        raise InvalidUsage(what + f"is a {type(p).__name__}; only plain nn.Parameter can stand in flat buffers")
    if p.is_meta:
        raise InvalidUsage(what + "is on the meta device and has no values: initialise the module first")
    if p.layout is not torch.strided:
        raise InvalidUsage(what + f"has layout {p.layout}; only dense ones can stand in flat buffers")
    if p.requires_grad and (options.dtype or p.dtype) not in COMPUTE:
        raise InvalidUsage(what + f"is {p.dtype}; Zero trains bfloat16, float32 and float64: give dtype=")
    if p.requires_grad and not p.is_floating_point():
        raise InvalidUsage(what + f"is {p.dtype}; only real ones are trained")


def wrapped(module: nn.Module) -> str | None:
    """What is wrong where a module in it averages or divides its parameters itself: DDP, DataParallel, and what
    torch.distributed makes of a module: FSDP, fully_shard, replicate."""
    for name, child in module.named_modules():
        theirs = any(c.__module__.startswith("torch.distributed.") for c in type(child).__mro__)
        if theirs or isinstance(child, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            return (
                f"{name or 'the module'} is a {type(child).__name__}, which averages or divides parameters itself: "
                "give Zero the plain module, or use that wrapper alone"
            )
    return None


def shared_with_ddp(
    wrapper: nn.parallel.DistributedDataParallel, parameters: list[tuple[str, nn.Parameter]]
) -> str | None:
    """What is wrong where `wrapper`, a DistributedDataParallel in whose forward this is asked, averages some of the
    parameters. What is inside of it cannot see it earlier."""
    left_out = getattr(wrapper, "parameters_to_ignore", ())
    theirs = {p for name, p in wrapper.module.named_parameters() if name not in left_out}
    for name, parameter in parameters:
        if parameter in theirs:
            return (
                f"parameter {name} is averaged by a DistributedDataParallel around this module and trained by Zero: "
                "use one of the two (train the module without DDP, or call remove() of the Zero)"
            )
    return None


def options_by_parameter(module: nn.Module, options_of: OptionsOf | None, make: MakeOptimizer) -> OptionsBy:
    """The options of every trained parameter, with which `make` has made an optimizer of other tensors."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if options_of is None:
        by: OptionsBy = {p: {} for _, p in named}
    elif not callable(options_of):
        raise InvalidUsage(f"options_of is a {type(options_of).__name__}, not a function of (name, parameter)")
    else:
        by = {p: options_of(name, p) for name, p in named}
    for name, p in named:
        if not isinstance(by[p], dict):
            raise InvalidUsage(f"options_of gave {by[p]!r} for {name}; it must give a dict of optimizer options")
    different = {repr(given): given for given in by.values()}.values()
    try:
        make([{"params": [torch.zeros(1, device=named[0][1].device)], **given} for given in different])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidUsage(f"the optimizer refuses its arguments: {error}") from error
    return by
