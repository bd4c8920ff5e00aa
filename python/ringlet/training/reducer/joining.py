"""Uneven inputs: a rank that has run out of them takes part in the others' collectives, by torch's own Join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from .reducer import GradientReducer


class ReducerJoinHook(JoinHook):
    """A rank without inputs makes the same collectives, with zeros, for each forward and backward of the others."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def main_hook(self) -> None:
        self._reducer.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies the parameters and buffers of one of the ranks with the most inputs to all ranks."""
        self._reducer.copy_state_from_one(is_last_joiner)


def one_rank(candidate: bool, group: dist.ProcessGroup, device: torch.device) -> int:
    """The highest rank for which `candidate` is true. Collective; it must be true on at least one rank."""
    found = torch.tensor([dist.get_rank(group) if candidate else -1], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return int(found)


def active_ranks(active: bool, group: dist.ProcessGroup, device: torch.device) -> int:
    """The number of ranks that call this for a step whose gradients they will reduce. Collective."""
    count = torch.tensor([int(active)], device=device)
    dist.all_reduce(count, group=group)
    return int(count)
