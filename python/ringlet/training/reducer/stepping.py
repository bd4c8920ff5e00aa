"""The optimizer in backward: updates a parameter as soon as its bucket is reduced, and drops its gradient.

Optimizers are those of this reducer's own argument, and those that torch.distributed.optim's
`_apply_optimizer_in_backward` has put on parameters. The hooks of the latter would step before the reduction, so they
are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringlet.errors import InvalidUsage

from .flat_gradients import FlatBucket

Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Stepping:
    """`optimizers` of each parameter, by name; steps each once a reduction."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]], factory: Factory | None) -> None:
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        self._parameters: list[list[torch.optim.Optimizer]] = []
        for name, parameter in parameters:
            found = _taken_over(parameter)
            if factory is not None:
                if found:
                    raise InvalidUsage(f"{name} has an optimizer in backward already; leave optimizer_in_backward=None")
                found = [factory([parameter])]
            if found:
                self.optimizers[name] = found
            self._parameters.append(found)
        self.active = bool(self.optimizers)
        self._stepped: dict[int, torch.nn.Parameter] = {}

    @torch.no_grad()
    def step_reduced(self, buckets: Sequence[FlatBucket], used: Sequence[int], waited: bool = False) -> None:
        """Updates the parameters of the buckets that are reduced by now, if they are `used` and not updated yet.

        `waited`: the caller has waited for all buckets. On a GPU a wait orders streams only, so a work may still run.
        """
        for bucket in buckets:
            waiting = [gradient for gradient in bucket.members if gradient.index not in self._stepped]
            if not waiting or not (waited or bucket.work.is_completed()):
                continue
            bucket.work.wait()
            for gradient in waiting:
                if used[gradient.index] and self._parameters[gradient.index]:
                    gradient.hand_over()
                    for optimizer in self._parameters[gradient.index]:
                        optimizer.step()
                self._stepped[gradient.index] = gradient.parameter

    def end(self) -> None:
        """The end of a reduction: drops the gradients that were used."""
        for index, parameter in self._stepped.items():
            if self._parameters[index]:
                parameter.grad = None
        self._stepped.clear()


def _taken_over(parameter: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
    found = list(getattr(parameter, "_in_backward_optimizers", []))
    if found:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return found
