"""A module on all ranks: the lines by which ranks compare it, and copies of one rank's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy


def ignored(module: torch.nn.Module) -> list[str]:
    """Names of the parameters and buffers that ranks do not share, from the attribute that DDP reads too."""
    return sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def parameters_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that are not ignored. A shared one appears once, under the first of its names."""
    left_out = set(ignored(module))
    return ((name, p) for name, p in module.named_parameters() if name not in left_out)


def buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    left_out = set(ignored(module))
    return ((name, b) for name, b in module.named_buffers() if name not in left_out)


def describe(module: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer, and the ignored ones: all that ranks must agree on."""
    lines = [f"ignored {name}" for name in ignored(module)]
    for name, p in parameters_of(module):
        strides = f" strides {list(p.stride())}" if p.layout is torch.strided and not is_lazy(p) else ""
        lines.append(f"parameter {name} {_layout_of(p)}{strides} requires_grad={p.requires_grad}")
    for name, b in buffers_of(module):
        lines.append(f"buffer {name} {_layout_of(b)}")
    return lines


def _layout_of(tensor: torch.Tensor) -> str:
    shape = "to be inferred" if is_lazy(tensor) else list(tensor.shape)
    return f"{tensor.dtype} on {tensor.device.type} shape {shape}"


@torch.no_grad()
def broadcast_state(module: torch.nn.Module, group: dist.ProcessGroup, source: int = 0) -> None:
    """Copies the parameters and buffers of group rank `source` to every rank, in place. Collective; shapes and dtypes
    must agree; ignored ones are left alone."""
    broadcast_tensors((tensor for _, tensor in (*parameters_of(module), *buffers_of(module))), group, source)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copies `tensors`, of any layout, of group rank `source` to every rank, in place. Collective."""
    sent = []
    for tensor in tensors:
        tensor = _own_elements(tensor.detach())
        dense = tensor.resolve_conj().resolve_neg().contiguous()
        sent.append((tensor, dense, dist.broadcast(bytes_of(dense), group=group, group_src=source, async_op=True)))
    for tensor, dense, work in sent:
        work.wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)


@torch.no_grad()
def broadcast_buffers(module: torch.nn.Module, group: dist.ProcessGroup, source: int = 0) -> None:
    """Copies the buffers of group rank `source` to every rank, as the bytes of one message for each device. Collective.

    Copies leave version counters alone: a forward whose backward is still to come may have saved a buffer.
    """
    alike: dict[torch.device, list[torch.Tensor]] = {}
    for _, buffer in sorted(buffers_of(module), key=lambda named: -named[1].element_size()):  # so each is aligned
        alike.setdefault(buffer.device, []).append(_own_elements(buffer))
    for found in alike.values():
        flat = torch.cat([bytes_of(buffer.resolve_conj().resolve_neg()) for buffer in found])
        dist.broadcast(flat, group=group, group_src=source)
        if dist.get_rank(group) != source:
            with torch.autograd._unsafe_preserve_version_counter(tuple(found)):
                for buffer, values in zip(found, flat.split([b.nbytes for b in found]), strict=True):
                    buffer.copy_(values.view(buffer.dtype).view_as(buffer))


def _own_elements(tensor: torch.Tensor) -> torch.Tensor:
    """A view that has each element of an expanded tensor once."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    once = [
        (1, 1) if stride == 0 else (size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided([size for size, _ in once], [stride for _, stride in once]) if tensor.numel() else tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in logical order; the tensor's own memory if it is contiguous. For calls that move
    tensors of any dtype: backends know fewer than torch."""
    return tensor.reshape(-1).view(torch.uint8)
