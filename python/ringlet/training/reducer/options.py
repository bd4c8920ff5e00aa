"""The options of a reducer, as plain data that ranks can compare."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch

from ringlet.errors import InvalidUsage
from ringlet.training.agree import comparable

from . import buckets

MEASURED = "measured"
_MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """The arguments of GradientReducer that all ranks must agree on, under its names."""

    bucket_mb: float | str = 25
    first_bucket_mb: float = 1
    algorithm: str | None = None
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    delay: int = 0
    accumulate_dtype: torch.dtype | None = None
    reproducible: bool = False

    def __str__(self) -> str:
        return " ".join(f"{name}={comparable(value)}" for name, value in vars(self).items())

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that differ from the default."""
        return {name: value for name, value in vars(self).items() if value != getattr(Options, name)}

    @property
    def measured(self) -> bool:
        return isinstance(self.bucket_mb, str) and self.bucket_mb == MEASURED

    @property
    def caps(self) -> buckets.Caps:
        largest = 25.0 if isinstance(self.bucket_mb, str) else self.bucket_mb
        return buckets.Caps(max(1, int(largest * _MIB)), max(1, int(self.first_bucket_mb * _MIB)))

    @property
    def any_may_be_unused(self) -> bool:
        return self.find_unused_parameters or self.static_graph

    @property
    def used_change(self) -> bool:
        """Whether other parameters may get gradients in each backward."""
        return self.find_unused_parameters and not self.static_graph

    def check(self) -> None:
        """Raises InvalidUsage if an option is unknown or two exclude each other."""
        if not self.measured and not _is_size(self.bucket_mb):
            raise InvalidUsage(f"bucket_mb must be a number of MiB above 0 or {MEASURED!r}, got {self.bucket_mb!r}")
        if not _is_size(self.first_bucket_mb):
            raise InvalidUsage(f"first_bucket_mb must be a number of MiB above 0, got {self.first_bucket_mb!r}")
        if not isinstance(self.delay, int) or self.delay not in (0, 1):
            raise InvalidUsage(f"delay must be 0 (off) or 1 (gradients of the step before), got {self.delay!r}")
        if not isinstance(self.algorithm, str | None):
            raise InvalidUsage(f"algorithm must be the name of an algorithm or None, got {self.algorithm!r}")
        if self.accumulate_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise InvalidUsage(
                "accumulate_dtype must be float32, or bfloat16 or float16 to add up in the gradients' own dtype, got "
                f"{self.accumulate_dtype}"
            )
        if not isinstance(self.reproducible, bool):
            raise InvalidUsage(f"reproducible must be True or False, got {self.reproducible!r}")
        if self.reproducible and (self.delay or self.accumulate_dtype is not None):
            other = "delay" if self.delay else "accumulate_dtype"
            raise InvalidUsage(
                "reproducible=True gives a window its own averages, and adds in the gradients' own dtype, on a rank as "
                f"between ranks: leave out {other}="
            )
        if self.delay and self.any_may_be_unused:
            raise InvalidUsage(
                "delay=1 needs every parameter in every backward: leave out find_unused_parameters and static_graph"
            )
        if self.delay and not self.gradient_as_bucket_view:
            raise InvalidUsage("delay=1 returns views of its buckets: leave gradient_as_bucket_view=True")
        if self.measured and (self.delay or self.used_change):
            other = "delay=1" if self.delay else "find_unused_parameters=True"
            raise InvalidUsage(
                f"bucket_mb='measured' measures overlap, and with {other} there is none: leave one of them out"
            )


def _is_size(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value) and float(value) > 0
