"""What is written into parameters while all of them are whole: rank 0's values, for every rank's shards and masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InvalidUsage
from .build import Parts
from .gather import Residency
from .shards import FlatUnit
from .traffic import Traffic
from .units import Slot


class Changes:
    """From when it is made until `keep`. A change is what autograd counts as one, or other memory given to a parameter;
    what is written through `parameter.data` is neither."""

    def __init__(self, module: nn.Module, parts: Parts, residency: Residency | None, traffic: Traffic) -> None:
        self.kept = False
        self._parts, self._residency, self._traffic = parts, residency, traffic
        self._named = list(module.named_parameters())
        self._places = {slot.parameter: (flat, slot) for flat in parts.flats for slot in flat.unit.slots}
        self._before = [_state(parameter) for _, parameter in self._named]

    @torch.no_grad()
    def keep(self) -> None:
        """Collective."""
        here = [int(_state(p) != before) for (_, p), before in zip(self._named, self._before, strict=True)]
        rows = [here, here if self._traffic.rank == 0 else [0] * len(here)]
        everyone = torch.tensor(rows, dtype=torch.int32, device=self._named[0][1].device)
        dist.all_reduce(everyone, dist.ReduceOp.MAX, group=self._traffic.group)
        missed = None
        for (name, parameter), anywhere, on_rank_0 in zip(self._named, *everyone.tolist(), strict=True):
            if not anywhere:
                continue
            self.kept = True
            if parameter in self._places:
                self._take(*self._places[parameter], masters=bool(on_rank_0))
            else:
                self._take_whole(parameter)
            missed = missed or (None if on_rank_0 else name)
        if missed is not None:
            raise InvalidUsage(
                f"parameter {missed} was changed inside gathered(), but not on rank 0, whose values all ranks take"
            )

    def _take_whole(self, frozen: nn.Parameter) -> None:
        dense = frozen.detach().contiguous()
        dist.broadcast(dense, group=self._traffic.group, group_src=0)
        frozen.copy_(dense)

    def _take(self, flat: FlatUnit, slot: Slot, masters: bool) -> None:
        whole = flat.whole
        if whole is None:
            assert self._residency is not None
            whole = self._residency.buffer_of(flat)
        values = whole[slot.start : slot.stop]
        if slot.parameter.data_ptr() != values.data_ptr():
            values.copy_(slot.parameter.reshape(-1))
            slot.parameter.data = flat.view(slot, whole)
        dist.broadcast(values, group=self._traffic.group, group_src=0)
        if flat.whole is None:
            _copy_common(flat.shard, flat.start, values, slot.start)
        for piece in self._parts.sharded.pieces:
            if masters and piece.flat is flat and piece.is_master:
                _copy_common(piece.tensor, flat.start + piece.start, values, slot.start)


@contextmanager
def gathered(module: nn.Module, parts: Parts, residency: Residency | None, traffic: Traffic) -> Iterator[Changes]:
    """All parameters are whole inside, and what rank 0 changed is kept at the end."""
    if residency is not None:
        residency.hold_all()
    changes = Changes(module, parts, residency, traffic)
    try:
        yield changes
        changes.keep()
    finally:
        if residency is not None:
            residency.let_go_all(changes.kept)


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _copy_common(to: torch.Tensor, to_start: int, values: torch.Tensor, start: int) -> None:
    """Copies what both have: elements from `to_start` and from `start` of one unit."""
    first, last = max(to_start, start), min(to_start + to.numel(), start + values.numel())
    if first < last:
        to[first - to_start : last - to_start].copy_(values[first - start : last - start])
