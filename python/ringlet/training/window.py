"""Micro-batches between two updates: counted, and compared between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringlet.errors import InvalidUsage

from .agree import Numbers


class Window:
    """Counts backwards: `seen` of `k` micro-batches are in the window under way."""

    def __init__(self, k: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.k, self.seen = k, 0
        self._group, self._device = group, device

    def told(self) -> str:
        return f"after {self.seen} of {self.k} micro-batches"

    def compare(self, seen: int) -> Numbers:
        """Starts to gather the ranks' numbers of micro-batches. Collective."""
        return Numbers(seen, self._group, self._device)

    @staticmethod
    def refuse_unequal(counts: list[int], what: str) -> None:
        """`what`: has happened, and is to be done."""
        if len(set(counts)) > 1:
            told = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
            raise InvalidUsage(
                f"ranks ended a window with different numbers of micro-batches: {told}. {what}, and give every rank "
                "the same number of micro-batches"
            )
