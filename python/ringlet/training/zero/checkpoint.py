"""Shards as torch.distributed.checkpoint sees them: parts of tensors of the parameters' own shapes.

A shard is a range of a parameter's elements in order, and a checkpoint knows only boxes. So a range is given as the few
boxes that it consists of. A checkpoint has ordinary shapes and names. So a Zero of any stage, limits and world can load
it, and so can a plain module, or any other reader of such checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringlet.errors import InvalidUsage

from .optimizer import Piece, ShardedOptimizer
from .units import FlatUnit, Slot

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class Box:
    """A part of a tensor: `sizes` elements from `offsets`, in each dimension; elements [start, stop) in order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements [start, stop) of a tensor of `shape`, in order: at most 2 a dimension."""
    if start >= stop:
        return
    if not shape:
        yield Box((), (), 0, 1)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the whole rows
    if first > last:  # within one row
        yield from _within(shape, start, stop, first - 1)
        return
    if start < first * inner:
        yield from _within(shape, start, first * inner, first - 1)
    if first < last:
        rest = tuple(shape[1:])
        yield Box((first, *(0 for _ in rest)), (last - first, *rest), first * inner, last * inner)
    if last * inner < stop:
        yield from _within(shape, last * inner, stop, last)


def _within(shape: Sequence[int], start: int, stop: int, row: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box((row, *box.offsets), (1, *box.sizes), box.start + before, box.stop + before)


class FlatShard(torch.Tensor):
    """This rank's part of a tensor of shape `shape`, as torch.distributed.checkpoint takes it.

    `runs`: (first element, values), 1-D views of the memory that is saved from and loaded into. No arithmetic.
    """

    runs: list[tuple[int, torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: torch.Size, runs: list[tuple[int, torch.Tensor]], dtype: torch.dtype) -> FlatShard:
        shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        shard.runs = runs
        return shard

    def __init__(self, shape: torch.Size, runs: list[tuple[int, torch.Tensor]], dtype: torch.dtype) -> None:
        self._parts = {
            torch.Size(box.offsets): (box, values[box.start - first : box.stop - first].view(box.sizes))
            for first, values in runs
            for box in boxes(shape, first, first + values.numel())
        }

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{func} does not work on a shard: save and load it with torch.distributed.checkpoint"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        held = [(first, first + values.numel()) for first, values in self.runs]
        return f"FlatShard(elements {held} of {list(self.shape)}, {self.dtype})"

    # torch.distributed.checkpoint takes a second to import: who calls these has done so.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(box.sizes)),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offset, (box, _) in self._parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offset, torch.Size(box.sizes)) for offset, (box, _) in self._parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._parts[torch.Size(index.offset)][1]


def _shard_of(slot: Slot, flat: FlatUnit, tensors: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """`tensors`: (first element within the unit's shard, values), of one dtype."""
    if slot.start == slot.stop:
        return torch.empty(slot.shape, dtype=tensors[0][1].dtype)
    runs = []
    for place, values in tensors:
        begin = flat.start + place
        first, last = max(slot.start, begin), min(slot.stop, begin + values.numel())
        if first < last:
            runs.append((first - slot.start, values[first - begin : last - begin]))
    return FlatShard(slot.shape, runs, tensors[0][1].dtype)


def model_state(module: nn.Module, flats: list[FlatUnit], sharded: ShardedOptimizer) -> dict[str, Any]:
    """Parameters by name (masters if there are any), and the buffers that the module itself would save."""
    pieces = _by_flat(sharded)
    parts: dict[nn.Parameter, torch.Tensor] = {}
    for flat in flats:
        held = [(piece.start, piece.tensor) for piece in pieces.get(flat, [])] or [(0, flat.shard)]
        for slot in flat.unit.slots:
            parts[slot.parameter] = _shard_of(slot, flat, held)
    state: dict[str, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):  # a shared one under all its names
        # those without a part are frozen, where only stage 3 shards them
        state[name] = parts[parameter] if parameter in parts else parameter.detach()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                state[f"{prefix}.{name}" if prefix else name] = buffer
    return state


def optimizer_state(flats: list[FlatUnit], sharded: ShardedOptimizer) -> dict[str, Any]:
    """{"state": {name: {key: value}}, "param_groups": [...]}, parameters by name, as torch's own
    `get_optimizer_state_dict` has them."""
    state: dict[str, Any] = {}
    for flat, own in _by_flat(sharded).items():
        for slot in flat.unit.slots:
            holding = [piece for piece in own if piece.has_of(slot)]
            if not holding:
                continue
            state[slot.name] = {
                key: _shard_of(slot, flat, [(p.start, sharded.elementwise_states(p)[key]) for p in holding])
                for key in sharded.elementwise_states(holding[0])
            }
            state[slot.name].update(_copied(sharded.other_states(holding[0])))
    named = zip(sharded.optimizer.param_groups, sharded.group_names, strict=True)
    return {"state": state, "param_groups": [{**group, "params": names} for group, names in named]}


def load_optimizer_state(loaded: dict[str, Any], sharded: ShardedOptimizer) -> None:
    """Takes the states that are not elementwise. The elements themselves were loaded in place."""
    groups = loaded["param_groups"]
    for index, (saved, names) in enumerate(zip(groups, sharded.group_names, strict=True)):
        if sorted(saved["params"]) != names:
            apart = ", ".join(sorted(set(names) ^ set(saved["params"])))
            raise InvalidUsage(
                f"parameter group {index} was saved with other parameters, so its options are not those of {apart}: "
                "give Zero the options_of= that it was saved with"
            )
    for piece in sharded.pieces:
        slot = next((slot for slot in piece.flat.unit.slots if piece.has_of(slot)), None)
        if slot is not None:
            mine = loaded["state"][slot.name]
            values = {key: mine[key] for key in sharded.other_states(piece)}
            sharded.optimizer.state[piece.tensor].update(_copied(values))
    for group, saved in zip(sharded.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _by_flat(sharded: ShardedOptimizer) -> dict[FlatUnit, list[Piece]]:
    pieces: dict[FlatUnit, list[Piece]] = {}
    for piece in sharded.pieces:
        pieces.setdefault(piece.flat, []).append(piece)
    return pieces
