"""What `spawn` gives the processes of ranks: arguments by value, and a file without a name."""

from __future__ import annotations

import io
import os
import pickle
import sys
from multiprocessing import reduction
from types import FunctionType
from typing import Any

import torch

from ringlet.errors import InvalidUsage, ResourceError


class MemoryFile:
    """A file without a name that a child process gets with its arguments. It ends with the last process."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    @classmethod
    def make(cls) -> MemoryFile:
        made = cls(os.memfd_create("ringlet-store"))
        if not os.path.exists(made.path()):  # a FileStore would wait for it
            made.close()
            raise ResourceError(f'spawn: there is no {made.path()}: mount /proc, or pass transport="threads"')
        return made

    def path(self) -> str:
        """The path of the file in this process."""
        return f"/proc/self/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryFile._from_parent, (reduction.DupFd(self._descriptor),)

    @staticmethod
    def _from_parent(descriptor: Any) -> MemoryFile:
        return MemoryFile(descriptor.detach())


class _Pickler(reduction.ForkingPickler):
    """Pickles tensors by value. torch's own way moves them to memory that all processes share, for all ranks the
    same."""

    def reducer_override(self, value: Any) -> Any:
        # The public method of a TypedStorage warns.
        shared = getattr(value, "_is_shared" if isinstance(value, torch.TypedStorage) else "is_shared", None)
        if isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)) and shared and not shared():
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__" and not main_is_a_file():
            raise InvalidUsage(
                f"spawn: {value.__qualname__} is of a program that is no file (a prompt, a notebook, python - or -c), "
                'which other processes cannot import: put it into a module, or pass transport="threads"'
            )
        return NotImplemented


def main_is_a_file() -> bool:
    """Whether multiprocessing can run the program's file again in another process. Raises InvalidUsage if it would try
    in vain."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file is not None and os.path.exists(file)):
        return True
    if file is None:
        return False
    raise InvalidUsage(
        f"spawn: the program is no file ({file}), so other processes cannot run it: put it into one, or pass "
        'transport="threads"'
    )


class ByValue:
    """What each rank gets a copy of."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        data = io.BytesIO()
        _Pickler(data, pickle.DEFAULT_PROTOCOL).dump(self.value)
        return ByValue._copied, (data.getvalue(),)

    @staticmethod
    def _copied(data: bytes) -> ByValue:
        return ByValue(pickle.loads(data))
