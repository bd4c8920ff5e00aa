"""Makes the parts of a Zero from a module that every rank has whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ringlet.training import replicas
from ringlet.training.call_labels import number_in
from ringlet.training.reproducible import Checks

from .memory import MappedFiles
from .optimizer import MakeOptimizer, OptionsBy, ShardedOptimizer, key_of
from .options import Options
from .shards import FlatUnit
from .traffic import Traffic
from .units import Limits, assign, give_labels


@dataclass
class Parts:
    """`files` keep this rank's offloaded tensors: the optimizer's and the parameters'."""

    flats: list[FlatUnit]
    sharded: ShardedOptimizer
    files: tuple[MappedFiles | None, MappedFiles | None]

    @property
    def trainable(self) -> list[FlatUnit]:
        return [flat for flat in self.flats if flat.unit.trainable]

    @property
    def in_shards(self) -> list[FlatUnit]:
        return [flat for flat in self.flats if flat.whole is None]


@torch.no_grad()
def build(
    module: nn.Module,
    options: Options,
    traffic: Traffic,
    make: MakeOptimizer,
    options_by: OptionsBy,
) -> Parts:
    """Copies rank 0's values to all ranks and moves them to flat buffers. Collective."""
    device = next(module.parameters()).device
    given = [f"options of {name}: {key_of(options_by[p])}" for name, p in module.named_parameters() if p in options_by]
    given += Checks.lines() if options.reproducible else []
    replicas.check_agreement([*options.lines(), *replicas.describe(module), *given], traffic.group, device)
    replicas.broadcast_state(module, traffic.group)
    values = {id(p): p.data for p in module.parameters()}
    if options.dtype is not None:
        module._apply(lambda tensor: tensor.to(options.dtype) if tensor.is_floating_point() else tensor)
    limits = Limits(min(options.bucket_elements, options.gather_elements), options.persistence_elements)
    offloads = (options.offload_optimizer, options.offload_parameters)
    files = [MappedFiles(o.path) if o is not None and o.path is not None else None for o in offloads]
    flats = []
    units = assign(module, limits, traffic.world)
    give_labels(units, number_in(traffic.group, "Zero"))
    for unit in units:
        if not unit.trainable and options.stage < 3:
            continue
        whole = options.stage < 3 or unit.small
        flat = FlatUnit(unit, [values.pop(id(slot.parameter)) for slot in unit.slots], whole, traffic.group)
        if offloads[1] is not None and not whole:
            flat.offload(offloads[1], files[1])
        flats.append(flat)
    trainable = [flat for flat in flats if flat.unit.trainable]
    sharded = ShardedOptimizer(trainable, make, options_by, options.sub_group_elements, (offloads[0], files[0]))
    for flat in flats:
        flat.initial = None
    return Parts(flats, sharded, (files[0], files[1]))
