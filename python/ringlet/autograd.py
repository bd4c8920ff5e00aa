"""Collectives inside autograd's graph: each is a linear map of all ranks' tensors, and its backward the transposed one.

`torch.autograd.Function` makes the call on fresh tensors. torch's own copy_ then puts the results where the caller
wants them, so that views, versions and leaves are treated as by any in-place operation. The backward is made of calls
too: every rank of the group must run it, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringlet import _C
from ringlet.errors import InvalidUsage

LINEAR = ("sum", "avg", "premul_sum")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
# The collective of each backward. The gradients of a broadcast are reduced; those of a reduce are broadcast.
_TRANSPOSED = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "scatter": "gather",
    "all_to_all": "all_to_all",
}

Tensors: TypeAlias = Tensor | list[Tensor] | None


@dataclass(frozen=True)
class _Call:
    """One collective: of which group, and what it takes besides tensors."""

    name: str
    group: _C.Group
    op: str
    algorithm: str
    root: int
    timeout: Any
    scale: float
    outputs_are_list: bool
    inputs_are_list: bool

    def run(self, name: str, output: Tensors, input: Tensors, op: str = "sum", algorithm: str = "auto") -> None:
        getattr(_C, name)(self.group, output, input, op, algorithm, self.root, self.timeout, self.scale, False)

    def forward(self, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """The results, in fresh tensors of the outputs' shapes."""
        if self.name in ("broadcast", "reduce"):
            results = [inputs[0].clone(memory_format=torch.contiguous_format)]
            self.run(self.name, results[0], results[0], self.op, self.algorithm)
            return results
        results = [_like(output) for output in outputs]
        self.run(self.name, self.as_output(results), self.as_input(inputs), self.op, self.algorithm)
        return results

    def backward(self, shapes: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The gradients of the inputs, which are like `shapes`, by those of the results."""
        name = _TRANSPOSED[self.name]
        if name in ("broadcast", "reduce"):
            received = [grads[0].clone(memory_format=torch.contiguous_format)]
            self.run(name, received[0], received[0])
            if self.group.rank == self.root:
                return [self.scaled(received[0])]
            return [torch.zeros_like(grads[0]) if name == "reduce" else self.scaled(received[0]) + grads[0]]
        received = [_like(shape) for shape in shapes]
        self.run(name, self.as_input(received), self.as_output(grads))
        return [self.scaled(grad) for grad in received]

    def as_output(self, tensors: list[Tensor]) -> Tensors:
        return tensors if self.outputs_are_list else tensors[0] if tensors else None

    def as_input(self, tensors: list[Tensor]) -> Tensors:
        return tensors if self.inputs_are_list else tensors[0] if tensors else None

    def scaled(self, grad: Tensor) -> Tensor:
        if self.name not in _REDUCING or self.op == "sum":
            return grad
        return grad / self.group.world if self.op == "avg" else grad * self.scale


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """tensors: `count` outputs, then the inputs."""
        outputs, inputs = list(tensors[:count]), list(tensors[count:])
        ctx.call, ctx.count = call, count
        ctx.shapes = [tensor.new_empty(()).expand(tensor.shape) for tensor in inputs]
        return tuple(call.forward([tensor.detach() for tensor in outputs], [tensor.detach() for tensor in inputs]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plain = [grad.resolve_conj().resolve_neg() for grad in grads]
        return None, None, *[None] * ctx.count, *ctx.call.backward(ctx.shapes, plain)


def collective(name: str, *arguments: Any) -> None:
    """What a collective on tensors that require grad does in grad mode. arguments: those of its function in _C."""
    group, output, input, op, algorithm, root, timeout, scale, async_op = arguments
    advice = "call it on .detach() or under torch.no_grad()"
    if name not in _TRANSPOSED:
        raise InvalidUsage(f"{name}: not differentiable, because only the root has a result; {advice}")
    if async_op:
        raise InvalidUsage(f"{name}: not differentiable with async_op=True; {advice}, or leave async_op=False")
    if name in _REDUCING and op not in LINEAR:
        raise InvalidUsage(f"{name}: {op} is not differentiable, only {', '.join(LINEAR)} are; {advice}")
    outputs, inputs = _flat(output), _flat(input)
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in (*outputs, *inputs)):
        what = "has a tangent of forward-mode differentiation, which calls do not carry"
        raise InvalidUsage(f"{name}: a tensor {what}: pass .detach()")
    _C.check_written(outputs, name)
    call = _Call(name, group, op, algorithm, root, timeout, scale, isinstance(output, list), isinstance(input, list))
    results = _Collective.apply(call, len(outputs), *outputs, *inputs)  # type: ignore[no-untyped-call]
    for place, result in zip(outputs, results, strict=True):
        place.copy_(result)


def _flat(tensors: Tensors) -> list[Tensor]:
    if isinstance(tensors, list):
        return tensors
    return [] if tensors is None else [tensors]


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


_C.set_differentiable(collective)
