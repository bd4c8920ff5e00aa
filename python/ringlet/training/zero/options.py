"""The options of a Zero, checked before Zero makes anything."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass, fields
from typing import Any

import torch

from ringlet.errors import InvalidUsage
from ringlet.training.reproducible import refuse_k

COMPUTE = (torch.bfloat16, torch.float32, torch.float64)


def refuse_max_norm(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0:
        raise InvalidUsage(f"max_norm must be positive, got {value!r}")


@dataclass(frozen=True, repr=False)
class Offload:
    """The place for tensors that a step needs only for a short time.

    device: "cpu", host memory, whose pages `pin_memory` locks (needs an accelerator), or "file", memory-mapped files in
    the folder `path`. A model on the CPU has its states in host memory anyway, so "cpu" moves nothing.
    """

    device: str
    path: str | os.PathLike[str] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "file"):
            raise InvalidUsage(f"Offload: device must be 'cpu' or 'file', got {self.device!r}")
        if (self.device == "file") != (self.path is not None):
            raise InvalidUsage("Offload: pass path= (a folder) with 'file', and leave it out with 'cpu'")
        if self.path is not None and not (isinstance(self.path, (str, os.PathLike)) and os.path.isdir(self.path)):
            raise InvalidUsage(f"Offload: path {self.path!r} is not a folder")
        if not isinstance(self.pin_memory, bool):
            raise InvalidUsage(f"Offload: pin_memory must be True or False, got {self.pin_memory!r}")
        if self.pin_memory and (self.device == "file" or not torch.accelerator.is_available()):
            raise InvalidUsage("Offload: pin_memory=True needs device='cpu' and an accelerator")

    def __repr__(self) -> str:
        path = "" if self.path is None else f", {os.fspath(self.path)!r}"
        return f"Offload({self.device!r}{path}{', pin_memory=True' if self.pin_memory else ''})"


def offload_of(name: str, given: Any) -> Offload | None:
    """The Offload that the setting `name` asks for."""
    if isinstance(given, str):
        return Offload(given)
    if given is not None and not isinstance(given, Offload):
        raise InvalidUsage(f"{name} must be 'cpu', an Offload or None, got {given!r}")
    return given


@dataclass(frozen=True, repr=False)
class Options:
    """The settings of a Zero except its model, optimizer and group. Sizes are in elements; defaults are Zero's."""

    stage: int = 1
    dtype: torch.dtype | None = None
    accumulate: int = 1
    average: bool = True
    accumulate_dtype: torch.dtype | None = None
    max_norm: float | None = None
    bucket_elements: int = 1 << 23
    gather_elements: int = 1 << 23
    sub_group_elements: int = 1 << 24
    persistence_elements: int = 10_000
    overlap: bool = True
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    print_every: int = 0
    print_times: bool = False
    reproducible: bool = False
    optimizer: str = ""  # class and defaults, as ranks compare them

    def __post_init__(self) -> None:
        if not _whole_number(self.stage) or self.stage not in (1, 2, 3):
            raise InvalidUsage(f"stage must be 1, 2 or 3, got {self.stage!r}; for stage 0 use GradientReducer")
        if self.dtype is not None and self.dtype not in COMPUTE:
            hint = "; it needs loss scaling, bfloat16 does not" if self.dtype is torch.float16 else ""
            raise InvalidUsage(f"dtype must be bfloat16, float32 or float64, got {self.dtype}{hint}")
        if self.accumulate_dtype not in (None, torch.bfloat16, torch.float32):
            raise InvalidUsage(f"accumulate_dtype must be float32 or bfloat16, got {self.accumulate_dtype}")
        for name in ("accumulate", "bucket_elements", "gather_elements", "sub_group_elements"):
            value = getattr(self, name)
            if not _whole_number(value) or value < 1:
                raise InvalidUsage(f"{name} must be a whole number from 1 on, got {value!r}")
        for name in ("persistence_elements", "print_every"):
            value = getattr(self, name)
            if not _whole_number(value) or value < 0:
                raise InvalidUsage(f"{name} must be a whole number from 0 on, got {value!r}")
        for name in ("average", "overlap", "print_times", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidUsage(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_norm is not None:
            refuse_max_norm(self.max_norm)
            if math.isinf(self.max_norm):
                raise InvalidUsage("max_norm must be positive and finite, got inf; None does not clip")
        if self.reproducible:
            refuse_k(self.accumulate, self.average, "accumulate=")
        if self.reproducible and self.accumulate_dtype is not None:
            raise InvalidUsage(
                "reproducible=True adds in the gradients' own dtype, on a rank as between ranks: leave out "
                "accumulate_dtype="
            )
        if self.offload_parameters is not None and self.stage != 3:
            raise InvalidUsage(
                f"offload_parameters needs stage 3: at stage {self.stage} every rank keeps whole parameters"
            )
        if self.print_times and not self.print_every:
            raise InvalidUsage("print_times=True needs print_every: pass print_every= too")

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which gradients of `dtype` add up over a window."""
        return dtype if dtype.itemsize > 2 or self.reproducible else self.accumulate_dtype or torch.float32

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in self.chosen().items())})"

    def chosen(self) -> dict[str, Any]:
        """The settings that are not their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def lines(self) -> list[str]:
        """The lines on which ranks must agree."""
        alone = ("offload_optimizer", "offload_parameters", "print_every", "print_times")
        return [f"setting {f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in alone]


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
