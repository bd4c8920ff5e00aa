"""Places gradients in buckets, as plain data. A bucket is one flat buffer. No torch here.

A bucket holds gradients of one dtype on one device, in the expected order of the backward. This is the reverse order of
registration until a backward has shown the real order. Buckets are listed in the order in which they fill, and every
rank must launch them in that order. Source: PyTorch DDP (Li et al., VLDB 2020). A bucket of DDP may exceed its cap.
Here only a single parameter larger than the cap exceeds it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from ringlet.training import flat


@dataclass(frozen=True)
class Entry:
    """One gradient to place: `count` elements of `item_bytes` bytes; only equal (dtype, device) keys share a bucket."""

    name: str
    count: int
    item_bytes: int
    dtype: Hashable
    device: Hashable

    @property
    def nbytes(self) -> int:
        return self.count * self.item_bytes


@dataclass(frozen=True)
class Slot:
    """The place of entry `index` in its bucket's flat buffer: `count` elements from element `offset`."""

    index: int
    offset: int
    count: int


@dataclass(frozen=True)
class Bucket:
    """A flat buffer of `count` elements, the gaps between aligned slots included."""

    dtype: Hashable
    device: Hashable
    item_bytes: int
    slots: tuple[Slot, ...]
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.item_bytes


@dataclass(frozen=True)
class Caps:
    """Largest bucket in bytes, and the largest first bucket of each dtype and device (small, so that
    communication starts early)."""

    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20


def assign(entries: Sequence[Entry], caps: Caps, order: Iterable[int] | None = None) -> list[Bucket]:
    """Places every entry in exactly one bucket.

    `order` is a permutation of range(len(entries)), the order in which gradients become ready; by default the last
    entry first. An empty gradient gets a slot of no elements. Returns the buckets in the order in which they fill: by
    the place in `order` of the last gradient each one waits for.
    """
    wanted = list(order) if order is not None else list(range(len(entries) - 1, -1, -1))
    groups: list[list[int]] = []
    filling: dict[tuple[Hashable, Hashable], list[int]] = {}
    room_bytes: dict[tuple[Hashable, Hashable], int] = {}
    for index in wanted:
        entry = entries[index]
        key = (entry.dtype, entry.device)
        if key not in filling or entry.nbytes > room_bytes[key]:
            room_bytes[key] = caps.bucket_bytes if key in filling else min(caps.first_bucket_bytes, caps.bucket_bytes)
            filling[key] = []
            groups.append(filling[key])
        filling[key].append(index)
        room_bytes[key] -= entry.nbytes
    return lay_out(entries, groups, wanted)


def lay_out(entries: Sequence[Entry], groups: Iterable[list[int]], order: Iterable[int]) -> list[Bucket]:
    """The buckets of `groups`, which hold every entry once, in the order in which they fill when gradients become
    ready in `order`. A group's own order must be that of `order`."""
    position = {index: place for place, index in enumerate(order)}
    return [_lay_out(entries, group) for group in sorted(groups, key=lambda group: position[group[-1]])]


def _lay_out(entries: Sequence[Entry], group: list[int]) -> Bucket:
    first = entries[group[0]]
    starts, count = flat.lay_out((entries[index].count for index in group), first.item_bytes)
    slots = tuple(Slot(index, start, entries[index].count) for index, start in zip(group, starts, strict=True))
    return Bucket(first.dtype, first.device, first.item_bytes, slots, count)
