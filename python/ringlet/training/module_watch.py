"""Whether a module's parameters are still those that it had when it was wrapped; cheap enough for every forward."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_, methodcaller
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import replicas
from .agree import refuse_together
from .refusals import shared_with_ddp, wrapped

_values_of = methodcaller("values")  # those of a ScriptModule are no dict
_address_of = torch.Tensor.data_ptr
_impl_of = torch.Tensor._cdata.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class ModuleWatch:
    """Compares a module with what it was at construction.

    `same` is False after any change of: which modules there are, which parameters these hold, where a parameter's
    memory lies, which tensor of torch's core is behind it, whether a frozen one requires a gradient. It costs about
    0.1 us a parameter: all loops are the interpreter's own. If it is False, `change` describes the change if it
    concerns gradients. Then `take` lets `same` compare with the module as it is now. Of `moving` parameters, `same`
    compares neither memory nor core. `refuse_ddp` and `refuse_change` raise InvalidUsage on all ranks, for `who`, which
    trains the parameters `trained`. `others`: as for `wrapped`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        who: str,
        trained: list[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup,
        moving: Iterable[torch.Tensor] = (),
        others: tuple[type[torch.nn.Module], ...] = (),
    ) -> None:
        self._module, self._who, self._trained, self._group = module, who, trained, group
        self._others = others
        self._alone: Any = None  # the DDP whose forward was found to share no parameter
        self._moving = {id(p) for p in moving}
        self._at_first = dict(replicas.parameters_of(module))
        self._trainable = {id(p): _layout_of(p) for p in self._at_first.values() if p.requires_grad}
        self._impl_at_first = {id(p): _impl_of(p) for p in self._at_first.values() if id(p) not in self._moving}
        self.take()

    def refuse(self, message: str) -> NoReturn:
        refuse_together(message, self._group, self._trained[0][1].device)

    def refuse_ddp(self) -> None:
        """Call it in a forward: a DistributedDataParallel around the module averages its gradients, too."""
        active = DistributedDataParallel._get_active_ddp_module()  # type: ignore[attr-defined]
        if active is None or active is self._alone:
            return
        wrong = shared_with_ddp(active, self._trained, self._who)
        if wrong is not None:
            self.refuse(wrong)
        self._alone = active

    def refuse_change(self) -> None:
        wrong = wrapped(self._module, {id(p) for _, p in self._trained}, self._who, *self._others)
        if wrong is not None:
            self.refuse(wrong)
        change = self.change()
        if change is not None:
            self.refuse(
                f"the module changed after {self._who} was made ({change}): undo the change, or call remove() and "
                f"make a new {self._who}, on every rank (add adapters, freeze and convert before you make it)"
            )

    def take(self) -> None:
        """Of a module that torch.func.functional_call has filled with other tensors, takes nothing."""
        if not all(isinstance(p, torch.nn.Parameter) for p in self._module.parameters()):
            return
        self._modules = modules = list(self._module.modules())
        self._classes = list(map(type, modules))  # replicate() exchanges it
        self._parameters = [m._parameters for m in modules if m._parameters]
        self._children = [m._modules for m in modules if m._modules]
        self._empty = [table for m in modules for table in (m._parameters, m._modules) if not table]
        self._buffers = [m._buffers for m in modules]
        self._held = list(self._slots())
        self._children_held = [dict(children) for children in self._children]
        self._tensors = list({id(p): p for p in self._held if p is not None}.values())
        self._frozen = [p for p in self._tensors if not p.requires_grad]
        own = {id(p) for p in dict(replicas.parameters_of(self._module)).values()} - self._moving
        self._placed = [p for p in self._tensors if id(p) in own]
        self._addresses = list(map(_address_of, self._placed))
        self._impls = list(map(_impl_of, self._placed))

    def same(self) -> bool:
        held = list(self._slots())
        return (
            len(held) == len(self._held)
            and all(map(is_, held, self._held))  # never ==, which is elementwise
            and not any(self._empty)
            and self._children == self._children_held
            and list(map(type, self._modules)) == self._classes
            and not any(map(_requires_grad, self._frozen))
            and list(map(_address_of, self._placed)) == self._addresses
            and list(map(_impl_of, self._placed)) == self._impls
        )

    def change(self) -> str | None:
        """Describes the first parameter that came, went, was unfrozen, or has another shape, dtype or device.

        None if the change concerns no gradient: other values or strides, a frozen parameter, or a parameter whose place
        another tensor takes for a while (torch.func.functional_call).
        """
        now = dict(replicas.parameters_of(self._module))
        at_first = {id(p) for p in self._at_first.values()}
        for name, p in now.items():
            if id(p) in self._trainable:
                before, after = self._trainable[id(p)], _layout_of(p)
                if before != after:
                    return f"parameter {name} was {before} and is {after}"
                if id(p) in self._impl_at_first and _impl_of(p) != self._impl_at_first[id(p)]:
                    return (
                        f"parameter {name} was exchanged by torch.utils.swap_tensors, which leaves the hooks on its "
                        "gradient behind (torch.__future__.set_swap_module_params_on_conversion)"
                    )
            elif p.requires_grad and isinstance(p, torch.nn.Parameter):
                if id(p) in at_first:
                    return f"parameter {name} was frozen and requires a gradient now"
                if name in self._at_first:
                    return f"parameter {name} is another object (load_state_dict(assign=True) makes new ones)"
                return f"parameter {name} was not there before"
        there = {id(p) for p in now.values()}
        for name, p in self._at_first.items():
            stands_in = name in now and not isinstance(now[name], torch.nn.Parameter)
            if id(p) in self._trainable and id(p) not in there and not stands_in:
                return f"parameter {name} is no longer there"
        return None

    @property
    def has_buffers(self) -> bool:
        return any(self._buffers)

    def _slots(self) -> chain[torch.nn.Parameter | None]:
        return chain.from_iterable(map(_values_of, self._parameters))


def _layout_of(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}"
