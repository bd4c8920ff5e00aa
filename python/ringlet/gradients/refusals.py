"""What a reducer refuses about a module and about a backward, with the names of the parameters."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import InvalidUsage

SHOWN = 10  # names in a message


def refuse_unsupported(module: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise InvalidUsage(f"no parameter of {type(module).__name__} requires a gradient: there is nothing to reduce")
    for name, child in module.named_modules():
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse:
            raise InvalidUsage(f"{name or type(child).__name__} makes sparse gradients; make it with sparse=False")


def refuse_gradients(names: list[str], of: int, rank: int, static_graph: bool) -> NoReturn:
    """`names`, of `of` parameters, got no gradient, or with `static_graph` another number of them than at first."""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    if static_graph:
        raise InvalidUsage(
            f"rank {rank}: with static_graph=True {len(names)} of {of} parameters got their gradients another "
            f"number of times than in the first reduced backward: {shown}. Use find_unused_parameters=True instead"
        )
    raise InvalidUsage(
        f"rank {rank}: {len(names)} of {of} parameters got no gradient in this backward: {shown}. The averages count "
        "nothing from this rank for them. Use every parameter in the loss, or freeze these before making the reducer, "
        "or pass find_unused_parameters=True"
    )
