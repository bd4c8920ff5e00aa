"""The optimizer in backward: updates a parameter as soon as its bucket is reduced, and drops its gradient.

Optimizers are those of this reducer's own argument, and those that torch.distributed.optim's
`_apply_optimizer_in_backward` has put on parameters. The hooks of the latter would step before the reduction, so they
are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ringlet.errors import InvalidUsage

from .flat_gradients import Gradient
from .record import ReducerBackward

Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Stepping:
    """`optimizers` of each parameter, by name; steps each once a reduction."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]], factory: Factory | None) -> None:
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        for name, parameter in parameters:
            found = _taken_over(parameter)
            if factory is not None:
                if found:
                    raise InvalidUsage(f"{name} has an optimizer in backward already; leave optimizer_in_backward=None")
                found = [factory([parameter])]
            if found:
                self.optimizers[name] = found
        self.active = bool(self.optimizers)
        self._stepped: set[str] = set()

    def step(self, record: ReducerBackward, reduced: Iterable[Gradient], used: Sequence[int]) -> None:
        """Updates the parameters of gradients that are reduced by now, if they are `used` and not updated yet."""
        for gradient in reduced:
            if gradient.name in self._stepped:
                continue
            self._stepped.add(gradient.name)
            if used[gradient.index] and gradient.name in self.optimizers:
                record.give([gradient], used)
                for optimizer in self.optimizers[gradient.name]:
                    optimizer.step()

    def end(self, gradients: Iterable[Gradient]) -> None:
        """The end of a reduction: drops the gradients that were used."""
        for gradient in gradients:
            if gradient.name in self.optimizers:
                gradient.parameter.grad = None
        self._stepped.clear()


def _taken_over(parameter: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
    found = list(getattr(parameter, "_in_backward_optimizers", []))
    if found:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return found
