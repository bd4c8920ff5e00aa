"""Reused buffers, and tensors in memory-mapped files."""

from __future__ import annotations

import functools
import mmap
import os
import pathlib
import tempfile
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ringlet.errors import ResourceError
from ringlet.training.flat import allocate
from ringlet.training.gradient_hooks import storage_owners


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all tensors that share a storage."""
    return tensor.untyped_storage().data_ptr()


@functools.cache
def own_tensors() -> int:
    """storage_owners() of a tensor whose memory nothing else uses, after storage_key(). It depends on the version of
    torch."""
    tensor = torch.zeros(1, device="cpu")
    storage_key(tensor)
    return storage_owners(tensor)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that `tensors` lie in, each counted once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class Pool:
    """Flat buffers of one dtype and device that are borrowed and given back.

    There are never more buffers than were borrowed at one time, and none is larger than the largest request.
    `peak_bytes` is the largest size of all buffers, `peak_live` the largest size borrowed at one time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
        self._place = (dtype, device, group)
        self._free: list[torch.Tensor] = []
        self._aside: list[torch.Tensor] = []  # given back, but others have tensors of their memory
        self._borrowed: dict[int, torch.Tensor] = {}
        self.peak_bytes = 0
        self.peak_live = 0

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._free, *self._aside, *self._borrowed.values()))

    def borrow(self, count: int) -> torch.Tensor:
        """The first `count` elements of a buffer, with undefined values."""
        self.reclaim()
        fitting = [buffer for buffer in self._free if buffer.numel() >= count]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
            self._drop(buffer)
        else:
            if self._free:
                self._drop(max(self._free, key=torch.Tensor.numel))
            buffer = allocate(count, *self._place)
        self._borrowed[storage_key(buffer)] = buffer
        self.peak_live = max(self.peak_live, len(self._borrowed))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer[:count]

    def give_back(self, part: torch.Tensor) -> None:
        self._free.append(self._borrowed.pop(storage_key(part)))

    def set_aside(self, part: torch.Tensor) -> torch.Tensor:
        """Gives back a buffer of whose memory others have tensors. It is borrowed again after these are gone; until
        then `reclaim` finds it shared. Returns the buffer."""
        self._aside.append(self._borrowed.pop(storage_key(part)))
        return self._aside[-1]

    def reclaim(self) -> list[torch.Tensor]:
        """Frees buffers that are not shared any more, and returns the others."""
        self._free += [buffer for buffer in self._aside if storage_owners(buffer) <= own_tensors()]
        self._aside = [buffer for buffer in self._aside if storage_owners(buffer) > own_tensors()]
        return self._aside

    def _drop(self, buffer: torch.Tensor) -> None:
        self._free = [other for other in self._free if other is not buffer]


class MappedFiles:
    """Tensors in memory-mapped files of a folder. The files have no names, so none remains.

    Their pages are in memory while they are used. `release_pages` gives them back to the kernel, which keeps or writes
    them. If the disk is full, making a tensor raises the error, not a later use.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = pathlib.Path(folder)
        self._maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = max(1, count * dtype.itemsize)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                mapping = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise ResourceError(
                f"Offload cannot make a file of {nbytes} bytes in {self.folder}: {error.strerror}; "
                "pass the path of a folder with enough free space"
            ) from error
        tensor = torch.frombuffer(mapping, dtype=dtype)[:count]  # keeps the mapping alive
        self._maps[storage_key(tensor)] = mapping
        return tensor

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.zeros(tensor.numel(), tensor.dtype).copy_(tensor)

    def hold(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._maps

    def release_pages(self, tensors: Iterable[torch.Tensor]) -> None:
        for key in {storage_key(tensor) for tensor in tensors}:
            mapping = self._maps.get(key)
            if mapping is not None:
                mapping.madvise(mmap.MADV_DONTNEED)
