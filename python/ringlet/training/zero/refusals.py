"""The errors of a Zero about its arguments and its module, before anything moves, with the names of the parameters."""

from __future__ import annotations

import torch
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.training.refusals import refuse_module, refuse_scripted, without_values
from ringlet.training.replicas import ignored

from .optimizer import MakeOptimizer, OptionsBy, OptionsOf, key_of
from .options import COMPUTE, Options


def refuse_unsupported(module: nn.Module, options: Options) -> None:
    named = list(module.named_parameters())
    if options.stage == 3:
        refuse_scripted(module.modules(), "Zero at stage 3", "use stage 1 or 2, or the module before torch.jit.script")
    refuse_module(module, named, "Zero", nn.DataParallel)
    left_out = set(ignored(module))
    wrongs = [(f"parameter {name}", _unfit(p, options, name in left_out)) for name, p in named]
    wrongs += [(f"buffer {name}", without_values(buffer)) for name, buffer in module.named_buffers()]
    for what, wrong in wrongs:
        if wrong is not None:
            raise InvalidUsage(f"Zero: {what} {wrong}")
    wrong = _sharing(module)
    if wrong is not None:
        raise InvalidUsage(f"Zero: {wrong}")


def _unfit(p: nn.Parameter, options: Options, ignored: bool) -> str | None:
    if type(p) is not nn.Parameter and not nn.parameter.is_lazy(p):
        return f"is a {type(p).__name__}: only a plain nn.Parameter can be in a flat buffer"
    if (wrong := without_values(p)) is not None:
        return wrong
    if p.requires_grad and (options.dtype or p.dtype) not in COMPUTE:
        return f"is {p.dtype}: Zero trains bfloat16, float32 and float64: pass dtype="
    if p.requires_grad and not p.is_floating_point():
        return f"is {p.dtype}: Zero trains real parameters only"
    if ignored and (p.requires_grad or options.stage == 3):  # each rank's own values would be divided over the ranks
        return (
            "is in _ddp_params_and_buffers_to_ignore: Zero gives all ranks the same values of every parameter that it "
            "holds: train it outside of the module, or take it from that list"
        )
    return None


def _sharing(module: nn.Module) -> str | None:
    """The error text if a trained parameter has elements in the memory of another parameter or of a buffer, which flat
    buffers would part."""
    ranges = []
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if p.numel() > 0:
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            if last + 1 != p.numel():
                continue  # with gaps, in which another one may lie
            ranges.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size(), p.requires_grad, name))
    furthest, trained, other = 0, False, ""
    for begin, end, requires_grad, name in sorted(ranges):
        if begin < furthest and (trained or requires_grad):
            return (
                f"{other} and {name} lie in the same memory, but are two tensors, which Zero would part: make them one "
                "nn.Parameter, which Zero keeps shared, or give each its own memory"
            )
        if end > furthest:
            furthest, trained, other = end, requires_grad, name
    return None


def options_by_parameter(module: nn.Module, options_of: OptionsOf | None, make: MakeOptimizer) -> OptionsBy:
    """The options of every trained parameter. Tries them: `make` makes an optimizer of other tensors with them."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if options_of is not None and not callable(options_of):
        raise InvalidUsage(f"options_of must be a function of (name, parameter), got a {type(options_of).__name__}")
    by: OptionsBy = {p: options_of(name, p) if options_of is not None else {} for name, p in named}
    for name, p in named:
        if not isinstance(by[p], dict):
            raise InvalidUsage(f"options_of must return a dict of optimizer options, got {by[p]!r} for {name}")
        if of_zero := {"params", "param_names"} & by[p].keys():
            raise InvalidUsage(
                f"options_of: the dict for {name} has {min(of_zero)!r}: leave it out, Zero puts parameters into groups"
            )
    different = {key_of(given): given for given in by.values()}.values()
    try:
        make([{"params": [torch.zeros(1, device=named[0][1].device)], **given} for given in different])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidUsage(f"the optimizer refuses its arguments: {error}") from error
    return by
