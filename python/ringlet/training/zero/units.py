"""Units: the parameters that travel together, and their flat buffers.

A unit is a flat buffer of parameters of one dtype and device, in the order of registration, divided into `world` equal
shards. Rank r owns shard r. Units depend on the model, the limits and the world, never on the stage. So every stage
reduces the same buffers and gets the same bits. A module becomes one unit if it fits. A larger module, and a module
that only lists others, is divided into its children. Small parameters share units of their own, which stage 3 keeps
whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ringlet.training import flat
from ringlet.training.call_labels import make_call_labels
from ringlet.training.flat import allocate, part_of, same_place
from ringlet.training.refusals import listed

from .memory import MappedFiles
from .options import Offload

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
INDIVISIBLE = (nn.MultiheadAttention,)  # reads its child's parameters without calling it


@dataclass(eq=False)
class Slot:
    """One parameter's place: elements [start, stop) of its unit, in the order of a contiguous tensor.

    `user`: the undivided module whose forward may read the parameter.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    stop: int
    user: nn.Module


@dataclass(eq=False)
class Unit:
    """`count` elements, the zeros between aligned slots and at the end included; `shard_count` for each rank."""

    index: int
    slots: list[Slot]
    count: int
    shard_count: int
    dtype: torch.dtype
    device: torch.device
    trainable: bool
    small: bool
    label: int = 0  # of the unit's collectives

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The element ranges that belong to no parameter."""
        end = 0
        for slot in self.slots:
            if end < slot.start:
                yield end, slot.start
            end = slot.stop
        if end < self.count:
            yield end, self.count


def assign(module: nn.Module, largest: int, small_up_to: int, world: int) -> list[Unit]:
    """The units of `module`, in the order in which forward is expected to use them, those of small parameters last. A
    unit has at most `largest` elements, or one parameter; a parameter of at most `small_up_to` elements is small."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    small: list[nn.Parameter] = []
    groups: list[tuple[list[nn.Parameter], bool]] = []
    users: dict[int, nn.Module] = {}
    for user, parameters in _divide(module, largest, set(), root=True):
        users.update((id(p), user) for p in parameters)
        small += [p for p in parameters if p.numel() <= small_up_to]
        groups.append(([p for p in parameters if p.numel() > small_up_to], False))
    groups.append((small, True))
    units: list[Unit] = []
    for parameters, is_small in groups:
        for alike in _alike(parameters):
            for part in flat.packed(alike, largest, nn.Parameter.numel):
                placed = [(names[id(p)], p, users[id(p)]) for p in part]
                units.append(_lay_out(len(units), placed, is_small, world))
    return units


def give_labels(units: list[Unit], number: int) -> None:
    """number: of the Zero, among those of its group."""
    texts = [f"unit {u.index} of Zero {number} ({listed([slot.name for slot in u.slots], 2)})" for u in units]
    for unit, label in zip(units, make_call_labels(texts), strict=True):
        unit.label = label


def _divide(
    module: nn.Module, cap: int, seen: set[int], root: bool = False
) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    fresh = [p for p in module.parameters() if id(p) not in seen]
    fits = sum(p.numel() for p in fresh) <= cap and not root and not isinstance(module, CONTAINERS)
    if fits or isinstance(module, INDIVISIBLE):
        seen.update(map(id, fresh))
        yield module, fresh
        return
    direct = [p for p in module.parameters(recurse=False) if id(p) not in seen]
    seen.update(map(id, direct))
    yield module, direct
    for child in module.children():
        yield from _divide(child, cap, seen)


def _alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
    return list(groups.values())


def _lay_out(index: int, named: list[tuple[str, nn.Parameter, nn.Module]], small: bool, world: int) -> Unit:
    first = named[0][1]
    starts, end = flat.lay_out((parameter.numel() for _, parameter, _ in named), first.element_size())
    slots = [
        Slot(n, p, p.shape, start, start + p.numel(), user) for (n, p, user), start in zip(named, starts, strict=True)
    ]
    align = flat.alignment(first.element_size())
    shard = -(-end // (world * align)) * align
    return Unit(index, slots, shard * world, shard, first.dtype, first.device, first.requires_grad, small)


def flatten(unit: Unit, values: list[torch.Tensor]) -> torch.Tensor:
    """The unit as one tensor of a dtype that holds all `values`: its slots' values in order, zeros between them."""
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
    whole = torch.zeros(unit.count, dtype=dtype, device=unit.device)
    for slot, value in zip(unit.slots, values, strict=True):
        whole[slot.start : slot.stop].copy_(value.reshape(-1))
    return whole


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
