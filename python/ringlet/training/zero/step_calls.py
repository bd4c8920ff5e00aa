"""Makes `step` of the optimizer over the shards a Zero's.

A training loop that knows only optimizers (GradScaler, Lightning, the transformers Trainer) uses `Zero.optimizer`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ringlet.errors import InvalidUsage

from .optimizer import ShardedOptimizer
from .sharded_gradient import LOSS_SCALING

MARK = "ringlet: part of a Zero"  # in the optimizer's own state_dict()


def patch_optimizer_step(
    sharded: ShardedOptimizer, rank: int, zero_step: Callable[[], bool], zero_grad: Callable[[], None]
) -> None:
    """Makes `step` and `zero_grad` of the optimizer over the shards those of its Zero. Within an update, `step` is the
    optimizer's own, with its hooks. Its states are taken back only where they came from."""
    optimizer = sharded.optimizer
    whose = f"rank {rank}'s shards (digest {sharded.layout_digest()})"

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if sharded.update is not None:
            return sharded.run()
        _refuse_scaled(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharded.called = True
        try:
            zero_step()
        finally:
            sharded.called = False
        return loss

    def drop(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        zero_grad()

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        raise InvalidUsage(
            "zero.optimizer.add_param_group: a Zero makes its groups once: call remove() and make a new Zero, with "
            "options_of= for the options of a group"
        )

    def refuse_unmarked(_optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """torch finds nothing wrong with another rank's states: they have the same shapes."""
        if state.get(MARK) != whose:
            raise InvalidUsage(
                f"zero.optimizer.load_state_dict: these are the states of {state.get(MARK, 'another optimizer')}, and "
                f"this is {whose}: save and load the Zero itself with torch.distributed.checkpoint"
            )

    # methods, not functions: torch's schedules wrap the function behind a method
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(drop, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    optimizer.register_state_dict_post_hook(lambda _optimizer, state: {**state, MARK: whose})
    optimizer.register_load_state_dict_pre_hook(refuse_unmarked)
    # GradScaler leaves scaled gradients to such an optimizer, and so comes to `step`
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _refuse_scaled(optimizer: Any) -> None:
    if hasattr(optimizer, "grad_scale"):
        del optimizer.grad_scale, optimizer.found_inf
        raise InvalidUsage(LOSS_SCALING)
