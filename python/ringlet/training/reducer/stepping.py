"""The optimizer in backward: updates a parameter as soon as its bucket is reduced, and drops its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ringlet.errors import InvalidUsage

from .flat_gradients import Gradient
from .record import ReducerBackward

Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class InBackward:
    """`optimizers` of each parameter, by name: those of a reducer's own argument, or those that
    `_apply_optimizer_in_backward` of torch.distributed.optim has put on it. False if there are none."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], factory: Factory | None) -> None:
        if factory is not None and not callable(factory):
            raise InvalidUsage(
                f"GradientReducer: optimizer_in_backward is a {type(factory).__name__}, not callable: pass a function "
                "from a list of parameters to an optimizer"
            )
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        self._torchs: list[torch.nn.Parameter] = []
        self._hooks: list[tuple[Any, Any]] = []
        for name, parameter in named:
            found = list(getattr(parameter, "_in_backward_optimizers", []))
            if found and factory is not None:
                raise InvalidUsage(f"{name} has an optimizer in backward already; leave optimizer_in_backward=None")
            if found:
                self._torchs.append(parameter)
            elif factory is not None:
                found = [factory([parameter])]
            if found:
                self.optimizers[name] = found

    def __bool__(self) -> bool:
        return bool(self.optimizers)

    def take_over(self) -> None:
        """Takes torch's hooks away, which would step before the reduction."""
        if self._torchs:
            from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

            for handle in (handle for p in self._torchs for handle in param_to_optim_hook_handle_map.get(p, [])):
                hooks = handle.hooks_dict_ref()
                if hooks is not None and handle.id in hooks:
                    self._hooks.append((handle, hooks.pop(handle.id)))

    def give_back(self) -> None:
        """Ends `take_over`."""
        for handle, hook in self._hooks:
            hooks = handle.hooks_dict_ref()
            if hooks is not None:
                hooks[handle.id] = hook
        self._hooks.clear()

    def step(self, record: ReducerBackward, reduced: Iterable[Gradient], used: Sequence[int]) -> None:
        """Updates the parameters of gradients that are reduced by now, if they are `used` and not updated yet."""
        for gradient in reduced:
            if gradient.index in record.stepped:
                continue
            record.stepped.add(gradient.index)
            if used[gradient.index] and gradient.name in self.optimizers:
                record.give([gradient], used)
                for optimizer in self.optimizers[gradient.name]:
                    optimizer.step()

    def drop(self, gradients: Iterable[Gradient]) -> None:
        """The end of a reduction: drops the gradients that were used."""
        for gradient in gradients:
            if gradient.name in self.optimizers:
                gradient.parameter.grad = None
