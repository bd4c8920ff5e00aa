"""Allocates flat tensors: from the group's backend if it allocates tensors, else from torch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringlet.backend import backend_of


def allocate(count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    """`count` zeros. The `ringlet` backend gives registered memory, which peers read in place."""
    backend = backend_of(group, device)
    with torch.inference_mode(False):  # training may borrow a buffer that an evaluation has made
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(count, dtype=dtype, device=device).zero_()
        return torch.zeros(count, dtype=dtype, device=device)
