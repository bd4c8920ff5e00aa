"""The same module on every rank: that ranks agree on its parameters and buffers, and hold rank 0's values of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from .errors import InvalidUsage


def describe(module: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer: all that ranks must agree on."""
    lines = []
    for name, p in module.named_parameters():
        layout = f"shape {list(p.shape)} strides {list(p.stride())}"
        lines.append(f"parameter {name} {p.dtype} {layout} requires_grad={p.requires_grad}")
    for name, b in module.named_buffers():
        lines.append(f"buffer {name} {b.dtype} shape {list(b.shape)}")
    return lines


def check_agreement(lines: list[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises InvalidUsage on every rank if `lines` differ, naming the first rank and line that differ from rank 0's.

    Collective. Costs one all-gather of 8 bytes on `device` while ranks agree.
    """
    world = dist.get_world_size(group)
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
    own = torch.tensor([digest], device=device)
    digests = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(digests, own, group=group)
    if all(int(other) == int(digests[0]) for other in digests):
        return
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, lines, group=group)
    for rank, theirs in enumerate(everyone):
        for place in range(max(len(theirs), len(everyone[0]))):
            expected = everyone[0][place] if place < len(everyone[0]) else "nothing"
            found = theirs[place] if place < len(theirs) else "nothing"
            if expected != found:
                raise InvalidUsage(f"ranks hold different models: rank 0 has '{expected}', rank {rank} has '{found}'")


@torch.no_grad()
def broadcast_state(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Copies rank 0's parameters and buffers to every rank, in place. Collective; shapes and dtypes must agree."""
    sent = []
    for tensor in (*module.parameters(), *module.buffers()):
        dense = tensor.detach().contiguous()
        sent.append((tensor, dense, dist.broadcast(dense, group=group, group_src=0, async_op=True)))
    for tensor, dense, work in sent:
        work.wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)
