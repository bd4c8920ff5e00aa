"""Whether a module's parameters are still those that it had when it was wrapped; cheap enough for every forward."""

from __future__ import annotations

from itertools import chain
from operator import is_

import torch

_address_of = torch.Tensor.data_ptr
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class ModuleWatch:
    """Compares a module with what it was when `take` was called last, at construction at first.

    `same` is False after any change of: which modules there are, which parameters these hold, where a parameter's
    memory lies, whether a frozen one requires a gradient. It may be False where nothing that matters has changed: what
    has, the caller looks up by name. It costs about 0.1 us a parameter: all loops are the interpreter's own.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.take()

    def take(self) -> None:
        modules = list(self._module.modules())
        self._parameters = [m._parameters for m in modules if m._parameters]
        self._children = [m._modules for m in modules if m._modules]
        self._empty = [table for m in modules for table in (m._parameters, m._modules) if not table]
        self._buffers = [m._buffers for m in modules]
        self._held = list(self._slots())
        self._children_held = [dict(children) for children in self._children]
        self._tensors = list({id(p): p for p in self._held if p is not None}.values())
        self._frozen = [p for p in self._tensors if not p.requires_grad]
        self._addresses = list(map(_address_of, self._tensors))

    def same(self) -> bool:
        held = list(self._slots())
        return (
            len(held) == len(self._held)
            and all(map(is_, held, self._held))  # never ==, which is elementwise
            and not any(self._empty)
            and self._children == self._children_held
            and not any(map(_requires_grad, self._frozen))
            and list(map(_address_of, self._tensors)) == self._addresses
        )

    @property
    def has_buffers(self) -> bool:
        return any(self._buffers)

    def _slots(self) -> chain[torch.nn.Parameter | None]:
        return chain.from_iterable(map(dict.values, self._parameters))
