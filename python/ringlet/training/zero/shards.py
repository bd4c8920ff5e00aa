"""The parameters of one unit: the whole flat buffer, or only this rank's shard of it."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from ringlet.training.flat import allocate, part_of, same_place

from .memory import MappedFiles
from .options import Offload
from .units import Slot, Unit


def flatten(unit: Unit, values: list[torch.Tensor]) -> torch.Tensor:
    """The unit as one tensor of a dtype that holds all `values`: its slots' values in order, zeros between them."""
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
    flat = torch.zeros(unit.count, dtype=dtype, device=unit.device)
    for slot, value in zip(unit.slots, values, strict=True):
        flat[slot.start : slot.stop].copy_(value.reshape(-1))
    return flat


class FlatUnit:
    """`shard`: this rank's elements. `whole`: all elements, if every rank keeps the whole unit; then `shard` and each
    parameter are parts of it. Else it is None, and stage 3's Residency gathers the unit."""

    def __init__(self, unit: Unit, values: list[torch.Tensor], whole: bool, group: dist.ProcessGroup) -> None:
        self.unit = unit
        rank = dist.get_rank(group)
        self.start = rank * unit.shard_count
        self.stop = self.start + unit.shard_count
        # dropped when masters are made
        self.initial: torch.Tensor | None = flatten(unit, values)[self.start : self.stop].clone()
        self.whole: torch.Tensor | None = None
        self._given: dict[Slot, torch.Tensor] = {}
        if whole:
            self.whole = allocate(unit.count, unit.dtype, unit.device, group)
            self.shard = self.whole[self.start : self.stop]
            for slot, value in zip(unit.slots, values, strict=True):
                self.give_part(slot)
                slot.parameter.data.copy_(value)
        else:
            self.shard = allocate(unit.shard_count, unit.dtype, unit.device, group)
            self.shard.copy_(self.initial)

    def view(self, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
        """The place of a parameter in `whole`, with the parameter's shape."""
        return whole[slot.start : slot.stop].view(slot.shape)

    def part(self, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
        """The same, for a parameter that the program may save."""
        return part_of(whole, slot.start, slot.shape)

    def give_part(self, slot: Slot) -> None:
        """Lets the parameter lie in `whole`."""
        assert self.whole is not None
        self._given[slot] = slot.parameter.data = self.part(slot, self.whole)

    def is_shared(self, slot: Slot) -> bool:
        """Whether torch has moved the memory that the parameter was given to share it with processes."""
        given = self._given.get(slot)
        return given is not None and self.whole is not None and not same_place(given, self.view(slot, self.whole))

    def offload(self, offload: Offload, files: MappedFiles | None) -> None:
        """Moves the shard. Only for a unit without `whole`."""
        if files is not None:
            self.shard = files.copy_of(self.shard.cpu())
        elif self.shard.device.type != "cpu":
            self.shard = self.shard.cpu()
        if offload.pin_memory:
            self.shard = self.shard.pin_memory()
