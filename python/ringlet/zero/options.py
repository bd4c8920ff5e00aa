"""What a Zero is asked for, checked before anything is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch

from ..errors import InvalidUsage

COMPUTE = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Offload:
    """Where tensors lie that a step needs only in passing.

    device: "cpu", host memory, where `pin_memory` locks the pages (needs an accelerator), or "file", memory-mapped
    files in the folder `path`. A model that is on the CPU has its states in host memory anyway: "cpu" moves nothing.
    """

    device: str
    path: str | os.PathLike[str] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "file"):
            raise InvalidUsage(f"offload goes to 'cpu' or 'file', not to {self.device!r}")
        if (self.device == "file") != (self.path is not None):
            raise InvalidUsage("offload to 'file' needs the path of a folder, and offload to 'cpu' takes none")
        if self.path is not None and not os.path.isdir(self.path):
            raise InvalidUsage(f"offload to file: {os.fspath(self.path)!r} is not a folder")
        if self.pin_memory and (self.device == "file" or not torch.accelerator.is_available()):
            raise InvalidUsage("pin_memory=True needs device='cpu' and an accelerator that reads pinned memory")


@dataclass(frozen=True)
class Options:
    """The settings of a Zero but its model, optimizer and group; sizes in elements."""

    stage: int
    dtype: torch.dtype | None
    accumulate: int
    average: bool
    max_norm: float | None
    bucket_elements: int
    gather_elements: int
    sub_group_elements: int
    persistence_elements: int
    overlap: bool
    offload_optimizer: Offload | None
    offload_parameters: Offload | None
    print_every: int
    print_times: bool
    optimizer: str  # class and defaults, for people

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise InvalidUsage(f"stage must be 1, 2 or 3, got {self.stage!r}; for stage 0 use GradientReducer")
        if self.dtype is not None and self.dtype not in COMPUTE:
            hint = "; it needs loss scaling, bfloat16 does not" if self.dtype is torch.float16 else ""
            raise InvalidUsage(f"dtype must be bfloat16, float32 or float64, got {self.dtype}{hint}")
        for name in ("accumulate", "bucket_elements", "gather_elements", "sub_group_elements"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidUsage(f"{name} must be a whole number from 1 on, got {value!r}")
        for name in ("persistence_elements", "print_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidUsage(f"{name} must be a whole number from 0 on, got {value!r}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise InvalidUsage(f"max_norm must be positive, got {self.max_norm}; None does not clip")
        if self.offload_parameters is not None and self.stage != 3:
            raise InvalidUsage(
                f"offload_parameters needs stage 3: at stage {self.stage} every rank keeps whole parameters in use"
            )
        if self.print_times and not self.print_every:
            raise InvalidUsage("print_times=True prints every `print_every` steps: give that too")

    def lines(self) -> list[str]:
        """What ranks must agree on."""
        alone = ("offload_optimizer", "offload_parameters", "print_every", "print_times")
        return [f"setting {f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in alone]
