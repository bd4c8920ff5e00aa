"""What `.grad` shows of a gradient that is in shards: torch's clipping functions can read its norm and scale it.

After a backward of a Zero, `.grad` of each parameter, and of each piece that `Zero.optimizer` holds, is a
ShardedGradient. A norm of one is that of the whole gradient: the first one after a backward or a change is collective.
Elementwise operations in place change this rank's elements only. Every other operation raises InvalidUsage.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ringlet.errors import InvalidUsage
from ringlet.training.backward import in_backward
from ringlet.training.optimizer_steps import StepWatcher
from ringlet.training.reproducible import norms_over_ranks

from .gradients import UnitGradient
from .optimizer import ShardedOptimizer
from .window import ZeroWindow

_aten = torch.ops.aten
_ELEMENTWISE = {
    _aten.mul_, _aten.div_, _aten.add_, _aten.sub_, _aten.clamp_, _aten.clamp_min_, _aten.clamp_max_, _aten.zero_,
    _aten.fill_, _aten.copy_, _aten.nan_to_num_, _aten.neg_, _aten.sign_,
}  # fmt: skip
_FOREACH = {
    getattr(_aten, "_foreach_" + name): getattr(_aten, name)
    for name in ("mul_", "div_", "add_", "sub_", "clamp_min_", "clamp_max_", "zero_", "copy_", "neg_", "sign_")
}

LOSS_SCALING = (
    "GradScaler on zero.optimizer: Zero does not support loss scaling, and bfloat16 does not need it: use "
    "GradScaler(enabled=False), or call zero.step()"
)


class ShardedGradient(torch.Tensor):
    """`number`: its place in `shown`. `held`: how many of its elements this rank has. `added_by_backward`: a whole
    gradient, not in shards yet."""

    number: int
    held: int
    _shown: weakref.ref[ShownGradients]
    added_by_backward: torch.Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, shown: ShownGradients, number: int, held: int) -> ShardedGradient:
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        # Weakly: `.grad` keeps this tensor, and the garbage collector does not look there.
        made._shown, made.number, made.held, made.added_by_backward = weakref.ref(shown), number, held, None
        return made

    @property
    def shown(self) -> ShownGradients:
        shown = self._shown()
        if shown is None:
            raise InvalidUsage("the Zero of this gradient is gone, with its shards: keep the module that it trains")
        return shown

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.held} of the elements of {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, called = kwargs or {}, func.overloadpacket
        if called in (_aten.detach, _aten.detach_) or (
            called is _aten._to_copy and _changes_layout_only(*args, **kwargs)
        ):
            return args[0]
        if called in (_aten.add, _aten.add_) and in_backward() and isinstance(args[0], cls):
            return _accumulate(args[0], args[1], called is _aten.add_)
        if called is _aten.linalg_vector_norm and args[1:2] and not kwargs.get("dim") and len(args) < 3:
            return args[0].shown.norm(args[0], args[1], kwargs.get("dtype"))
        if called is _aten.linalg_vector_norm and len(args) == 1:
            return args[0].shown.norm(args[0], 2, kwargs.get("dtype"))
        if called is _aten._foreach_norm:
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            dtype = kwargs.get("dtype")  # the program may have put whole tensors into some `.grad`
            return [
                g.shown.norm(g, order, dtype) if isinstance(g, cls) else torch.linalg.vector_norm(g, order, dtype=dtype)
                for g in args[0]
            ]
        if called in _ELEMENTWISE and isinstance(args[0], cls):
            return args[0].shown.change(args[0], func, args[1:], kwargs)
        if called in _FOREACH and any(isinstance(g, cls) for g in args[0]):
            for index, gradient in enumerate(args[0]):
                each = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args[1:]]
                if isinstance(gradient, cls):
                    gradient.shown.change(gradient, _FOREACH[called], each, kwargs)
                else:
                    _FOREACH[called](gradient, *each, **kwargs)
            return None
        if called is _aten._amp_foreach_non_finite_check_and_unscale_:
            raise InvalidUsage(LOSS_SCALING)
        raise InvalidUsage(
            f"{func} on the `.grad` of a parameter that a Zero trains: each rank holds a part of it only. Norms, "
            "torch.nn.utils.clip_grad_norm_ and clip_grad_value_, and elementwise changes in place (mul_, add_ ...) "
            "work; so does `parameter.grad = whole tensor` with the same values on every rank"
        )


def _changes_layout_only(gradient: ShardedGradient, dtype: Any = None, device: Any = None, **_: Any) -> bool:
    return dtype in (None, gradient.dtype) and device in (None, gradient.device)


def _accumulate(gradient: ShardedGradient, arrived: torch.Tensor, in_place: bool) -> ShardedGradient:
    """Autograd adds a gradient that it did not see coming: Zero takes it from here."""
    made = gradient
    if not in_place:
        made = ShardedGradient(gradient, gradient.shown, gradient.number, gradient.held)
        made.added_by_backward = gradient.added_by_backward
    arrived = arrived.detach()
    made.added_by_backward = arrived if made.added_by_backward is None else made.added_by_backward + arrived
    return made


class ShownGradients(StepWatcher):
    """The ShardedGradients of a Zero. `show` puts them into `.grad`, `hide` takes them away."""

    def __init__(
        self, units: list[UnitGradient], sharded: ShardedOptimizer, group: dist.ProcessGroup, window: ZeroWindow
    ) -> None:
        self._group, self._window, self._units = group, window, units
        self._names: list[str] = []
        # Of each: its unit, and this rank's elements, as the unit's shard and the whole tensor have them.
        self._places: list[tuple[UnitGradient, slice, slice]] = []
        self._shown: list[tuple[torch.Tensor, ShardedGradient]] = []
        for unit in units:
            flat = unit.flat
            for slot in flat.unit.slots:
                first = max(slot.start, flat.start)
                held = max(0, min(slot.stop, flat.stop) - first)
                self._add(slot.name, slot.parameter, unit, first - flat.start, first - slot.start, held)
        self._slots = [gradient for _, gradient in self._shown]
        self._ids = {id(parameter) for parameter, _ in self._shown}
        by_flat = {unit.flat: unit for unit in units}
        self._groups = len(sharded.group_names)
        self._pieces = len(sharded.pieces)
        for piece in sharded.pieces:
            held = piece.stop - piece.start
            self._add("of zero.optimizer", piece.tensor, by_flat[piece.flat], piece.start, 0, held)
        self._norms: dict[float, torch.Tensor] = {}  # by order: of the shards' values, without the multiplier
        self._are_there = False

    def _add(self, name: str, tensor: torch.Tensor, unit: UnitGradient, start: int, first: int, held: int) -> None:
        """`start`, `first`: of its `held` elements, in the unit's shard and in the whole tensor."""
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter is one
            gradient = ShardedGradient(tensor, self, len(self._shown), held)
        self._names.append(name)
        self._places.append((unit, slice(start, start + held), slice(first, first + held)))
        self._shown.append((tensor, gradient))

    def _own_values(self, gradient: ShardedGradient) -> torch.Tensor:
        """This rank's elements, to be multiplied by the window's multiplier."""
        unit, of_shard, _ = self._places[gradient.number]
        return unit.value[of_shard]

    def _own_part(self, gradient: ShardedGradient, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1)[self._places[gradient.number][2]]

    def show(self) -> None:
        self._norms.clear()
        self._are_there = True
        for tensor, gradient in self._shown:
            gradient.added_by_backward = None
            tensor.grad = gradient

    def hide(self) -> None:
        """Leaves what autograd has put there already: a gradient, or a ShardedGradient to which it has added."""
        self._are_there = False
        for tensor, gradient in self._shown:
            if tensor.grad is gradient and gradient.added_by_backward is None:
                tensor.grad = None

    def before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Refuses a step of another optimizer over the module's parameters: it would find no gradients."""
        for group in optimizer.param_groups:
            untrained = (p for p in group["params"] if p.grad is None or isinstance(p.grad, ShardedGradient))
            for parameter in [*group["params"][:1], *untrained]:
                if id(parameter) in self._ids:
                    raise InvalidUsage(
                        f"step() of an optimizer ({type(optimizer).__name__}) that holds a parameter of shape "
                        f"{list(parameter.shape)} which a Zero trains: the gradients are in shards, and step() "
                        "would train nothing. Call zero.step(), or use zero.optimizer instead"
                    )

    def changed(self) -> list[int]:
        """The numbers of those that others have exchanged since `show`."""
        if not self._are_there:
            return []
        return [number for number, (tensor, gradient) in enumerate(self._shown) if tensor.grad is not gradient]

    def dropped(self, arrived: torch.Tensor | None) -> bool:
        """Whether the gradients of all parameters (but one that has `arrived` since) are None, as by zero_grad()."""
        parameters = [tensor for tensor, _ in self._shown[: len(self._slots)]]
        return all(tensor is arrived or tensor.grad is None for tensor in parameters)

    def exchanged(self, changed: list[int]) -> set[torch.Tensor]:
        return {self._shown[number][0] for number in changed}

    def names(self, numbers: list[int]) -> str:
        return ", ".join(self._names[number] for number in numbers[:3]) + (" ..." if len(numbers) > 3 else "")

    @torch.no_grad()
    def take(self, changed: list[int]) -> None:
        """Takes what others have put into `.grad`, the same on every rank, into the shards; None is zero."""
        self._norms.clear()
        for number in changed:
            tensor, gradient = self._shown[number]
            given = tensor.grad
            if given is not None and (isinstance(given, ShardedGradient) or given.layout is not torch.strided):
                raise InvalidUsage(f"the gradient {self._names[number]} was exchanged by one that Zero cannot read")
            values = self._own_values(gradient)
            if given is None:
                values.zero_()
            else:
                values.copy_(self._own_part(gradient, given.detach()))
            tensor.grad = gradient

    @torch.no_grad()
    def change(self, gradient: ShardedGradient, func: Any, others: Any, kwargs: dict[str, Any]) -> ShardedGradient:
        """An elementwise operation in place, on this rank's elements."""
        dropped = self._window.spent or (self._window.unfinished() and self._window.stepped)
        if func.__name__.startswith("zero_") and dropped:
            return gradient
        self._refuse_unfinished(str(func))
        self._window.fold()
        self._norms.clear()
        for other in others:
            if isinstance(other, ShardedGradient) or (
                isinstance(other, torch.Tensor) and other.numel() != 1 and other.shape != gradient.shape
            ):
                raise InvalidUsage(f"{func} on a ShardedGradient: pass numbers or whole tensors of its shape")
        own = [
            self._own_part(gradient, other)
            if isinstance(other, torch.Tensor) and other.shape == gradient.shape and other.dim() > 0
            else other
            for other in others
        ]
        func(self._own_values(gradient), *own, **kwargs)
        return gradient

    @torch.no_grad()
    def norm(self, gradient: ShardedGradient, order: float, dtype: torch.dtype | None) -> torch.Tensor:
        """The norm of the whole gradient. A piece of `Zero.optimizer` gives an equal part of the norm of all gradients:
        those of all pieces of a rank make up that norm."""
        self._refuse_unfinished("a norm")
        order = float(order)
        if not order > 0:
            raise InvalidUsage(f"the norm of order {order} of a sharded gradient: Zero has those of orders above 0")
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
        norms = self._norms[order]
        if gradient.number < len(self._slots):
            found = norms[gradient.number]
        elif self._groups > 1 or self._window.reproducible:
            why = "with reproducible=True" if self._groups == 1 else "which has several groups"
            raise InvalidUsage(
                f"clipping the parameters of zero.optimizer, {why}: a rank's pieces do not tell the norm: "
                "clip those of the module, call zero.clip_grad_norm_(), or pass max_norm= to Zero"
            )
        else:
            whole = torch.linalg.vector_norm(norms, order)
            found = whole if math.isinf(order) else whole * self._pieces ** (-1 / order)
        found = found * self._window.multiplier()
        return found.to(gradient.device, dtype or found.dtype)

    def _all_norms(self, order: float) -> torch.Tensor:
        if self._window.reproducible and order not in (2, math.inf):
            raise InvalidUsage(
                f"the norm of order {order} with reproducible=True, where only those of order 2 and inf do not depend "
                "on the number of ranks: clip by one of them"
            )
        device = self._units[0].flat.unit.device
        double = any(unit.flat.unit.dtype is torch.float64 for unit in self._units)
        norms = torch.zeros(len(self._slots), dtype=torch.float64 if double else torch.float32, device=device)
        if self._window.reproducible and order == 2:
            return norms.copy_(norms_over_ranks([[self._own_values(g)] for g in self._slots], self._group, device))
        for number, gradient in enumerate(self._slots):
            if gradient.held:
                norms[number] = torch.linalg.vector_norm(self._own_values(gradient), order, dtype=norms.dtype)
        if math.isinf(order):
            dist.all_reduce(norms, dist.ReduceOp.MAX, group=self._group)
        else:
            norms.pow_(order)
            dist.all_reduce(norms, group=self._group)
            norms.pow_(1 / order)
        return norms

    def _refuse_unfinished(self, what: str) -> None:
        why = self._window.unfinished()
        if why is not None:
            raise InvalidUsage(f"{what} of a gradient {why}")
