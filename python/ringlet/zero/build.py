"""Makes what a Zero is made of, from a module that every rank has whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .. import replicas
from ..errors import InvalidUsage
from .memory import MappedFiles
from .optimizer import MakeOptimizer, OptionsOf, ShardedOptimizer
from .options import COMPUTE, Options
from .shards import FlatUnit
from .traffic import Traffic
from .units import Limits, assign


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


def refuse_unsupported(module: nn.Module, options: Options) -> None:
    named = list(module.named_parameters())
    if not any(p.requires_grad for _, p in named):
        raise InvalidUsage(f"no parameter of {type(module).__name__} requires a gradient: there is nothing to train")
    for name, p in named:
        what = f"parameter {name} "
        if type(p) is not nn.Parameter:
            raise InvalidUsage(what + f"is a {type(p).__name__}; only plain nn.Parameter can stand in flat buffers")
        if p.is_meta:
            raise InvalidUsage(what + "is on the meta device and has no values: initialise the module first")
        if p.requires_grad and (options.dtype or p.dtype) not in COMPUTE:
            raise InvalidUsage(what + f"is {p.dtype}; Zero trains bfloat16, float32 and float64: give dtype=")
        if p.requires_grad and not p.is_floating_point():
            raise InvalidUsage(what + f"is {p.dtype}; only real ones are trained")
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise InvalidUsage(f"{name or 'module'} makes sparse gradients; make it with sparse=False")


@torch.no_grad()
def build(
    module: nn.Module,
    options: Options,
    traffic: Traffic,
    make: MakeOptimizer,
    options_of: OptionsOf | None,
) -> Parts:
    """Copies rank 0's values to all ranks and moves them to flat buffers. Collective."""
    device = next(module.parameters()).device
    replicas.check_agreement([*options.lines(), *replicas.describe(module)], traffic.group, device)
    replicas.broadcast_state(module, traffic.group)
    values = {id(p): p.data for p in module.parameters()}
    if options.dtype is not None:
        module.to(options.dtype)
    limits = Limits(min(options.bucket_elements, options.gather_elements), options.persistence_elements)
    offloads = (options.offload_optimizer, options.offload_parameters)
    files = [MappedFiles(o.path) if o is not None and o.path is not None else None for o in offloads]
    flats = []
    for unit in assign(module, limits, traffic.world):
        if not unit.trainable and options.stage < 3:
            continue
        whole = options.stage < 3 or unit.small
        flat = FlatUnit(unit, [values.pop(id(slot.parameter)) for slot in unit.slots], whole, traffic.group)
        if offloads[1] is not None and not whole:
            flat.offload(offloads[1], files[1])
        flats.append(flat)
    trainable = [flat for flat in flats if flat.unit.trainable]
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    by = {p: options_of(name, p) if options_of else {} for name, p in named}
    sharded = ShardedOptimizer(trainable, make, by, options.sub_group_elements, (offloads[0], files[0]))
    for flat in flats:
        flat.initial = None
    return Parts(flats, sharded, (files[0], files[1]))
