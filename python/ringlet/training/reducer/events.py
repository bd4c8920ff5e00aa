"""A reducer's events in the log (ringlet/log.py): its buckets, each time it lays them out, and merging's decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ringlet import log

from .buckets import Bucket

_MOST_SIZES = 8


def tell_layout(plan: Sequence[Bucket], group: dist.ProcessGroup, why: str) -> None:
    sizes = [f"{bucket.nbytes / 2**20:.2f}" for bucket in plan]
    left = len(sizes) - _MOST_SIZES
    listed = ", ".join(sizes[:_MOST_SIZES]) + (f" and {left} more" if left > 0 else "")
    parameters = sum(len(bucket.slots) for bucket in plan)
    _tell(f"GradientReducer: {parameters} parameters in buckets {why}: {listed} MiB", group)


def tell_merging(told: dict[str, Any], group: dist.ProcessGroup) -> None:
    """told: MeasuredMerging.describe(), once it has decided."""
    buckets, measured = told["buckets"], told.get("measured_s")
    took = "" if measured is None else "".join(f", {name} took {s * 1e3:.2f} ms" for name, s in measured.items())
    _tell(
        f"GradientReducer: merging keeps the {told['kept']} layout "
        f"({buckets['plain']} buckets plain, {buckets['merged']} merged{took})",
        group,
    )


def _tell(text: str, group: dist.ProcessGroup) -> None:
    place = dist.get_rank(group), dist.get_world_size(group)
    log.configure(*place)  # the group may be another backend's, which does not
    log.info(text, *place)
