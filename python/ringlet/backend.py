"""Registers the torch.distributed backend "ringlet" (csrc/bindings/c10d_backend.cc)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ringlet import _C
from ringlet.meeting import meeting_key

NAME = "ringlet"


def _make(options: Any, _pg_options: Any) -> _C.Backend:
    rank, world, store = options.group_rank, options.group_size, options.store
    key = meeting_key(store, f"ringlet/{options.group_id}", rank, world, options.timeout)
    return _C.make_backend(store, key, rank, world, options.timeout)


def register() -> None:
    """Makes `torch.distributed.init_process_group("ringlet")` work. Harmless when it is done already."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
