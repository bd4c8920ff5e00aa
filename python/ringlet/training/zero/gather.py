"""Stage 3: gathers and releases units.

A module's forward gathers the units of its own parameters. A backward gathers the units that an operation saved. If
autograd saves a gathered parameter, the hooks keep a place in its unit instead, so the buffer can serve another unit
meanwhile. While a unit is used, the unit that was next in the previous pass is gathered already. Units that no module
uses are released first, so a chain of modules has two whole units at any time. Source: ZeRO-3 (Rajbhandari et al., SC
2020), FSDP (Zhao et al., VLDB 2023).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ringlet.errors import InvalidUsage
from ringlet.training.backward import in_backward
from ringlet.training.gradient_hooks import ForwardHook, beside_modes, storage_owners

from .memory import MappedFiles, Pool, own_tensors, storage_key
from .released import Released, release, restore
from .traffic import Pending, Traffic
from .units import FlatUnit, Slot


@dataclass(eq=False)
class _Whole:
    """A gathered unit. `uses`: forwards that run with it. `awaited`: a backward still has to produce its gradients."""

    buffer: torch.Tensor
    pending: Pending
    uses: int = 0
    awaited: bool = False


@dataclass(frozen=True)
class _Saved:
    """Stands for a tensor that autograd saved: a part of a unit, with its values after so many updates. Its dtype may
    be another view of the unit's bytes. Positions are in elements of this dtype."""

    flat: FlatUnit
    updates: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class _Running:
    """A module's forward that runs with units. `hooks`: None until they are set; `all_hooks`: all that were set then.
    `frame`: of torch's call of the module."""

    module: nn.Module
    frame: FrameType | None
    materialized: list[tuple[FlatUnit, Slot]] = field(default_factory=list)
    hooks: Any = None
    all_hooks: list[tuple[Any, Any]] = field(default_factory=list)

    def ended(self) -> bool:
        """Whether the call has ended, without the hook behind it: torch calls that for an Exception, and not for a
        KeyboardInterrupt. The caller is in the same thread as the call."""
        if self.frame is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None


def _call_of_module() -> FrameType | None:
    """The frame of torch's nearest call of a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame


class _Order:
    """The order of use in the previous pass, to predict the next unit."""

    def __init__(self) -> None:
        self.expected: list[FlatUnit] = []
        self.seen: list[FlatUnit] = []
        self._place = 0

    def begin(self, otherwise: list[FlatUnit]) -> None:
        self.expected = self.seen or otherwise
        self.seen, self._place = [], 0

    def next_after(self, flat: FlatUnit) -> FlatUnit | None:
        self.seen.append(flat)
        if flat not in self.expected[self._place :]:
            return None
        self._place = self.expected.index(flat, self._place) + 1
        return self.expected[self._place] if self._place < len(self.expected) else None


class Residency:
    """Gathers and releases `flats`, the units in shards. Calls `on_backward` when a backward uses one. All its methods
    are collective: ranks must run the same modules in the same order."""

    def __init__(
        self, flats: list[FlatUnit], traffic: Traffic, files: MappedFiles | None, on_backward: Callable[[], object]
    ) -> None:
        self.flats = flats
        self.pools: dict[tuple[torch.dtype, torch.device], Pool] = {}
        self._usual_pools = self.pools
        self._held: Any = None  # while all are: the hooks on what autograd saves
        self._updates = 0
        self._traffic = traffic
        self._files = files
        self._on_backward = on_backward
        self._whole: dict[FlatUnit, _Whole] = {}
        self._of_storage: dict[int, FlatUnit] = {}
        self._current: FlatUnit | None = None
        self._forward, self._backward = _Order(), _Order()
        self._running: list[_Running] = []
        self._depth: dict[nn.Parameter, int] = {}
        self._materialized_version: dict[nn.Parameter, int] = {}
        self._aliased: list[tuple[FlatUnit, torch.Tensor]] = []  # released, but others have tensors of their buffers
        for flat in flats:
            for slot in flat.unit.slots:
                release(slot.parameter, slot.name, slot.shape)

    def attach(self, module: nn.Module) -> list[Any]:
        """Hooks on every module with parameters of its own, or that is one unit; returns their handles."""
        place = {slot.parameter: (flat, slot) for flat in self.flats for slot in flat.unit.slots}
        used: dict[nn.Module, list[tuple[FlatUnit, Slot]]] = {}
        for flat, slot in place.values():
            used.setdefault(slot.user, []).append((flat, slot))
        handles = []
        for child in module.modules():
            own = used.get(child, [])
            own = own + [place[p] for p in child.parameters(recurse=False) if p in place and place[p] not in own]
            if own:
                enter = child.register_forward_pre_hook(ForwardHook(partial(self._enter, own)), prepend=True)
                leave = child.register_forward_hook(ForwardHook(self._leave), always_call=True)
                load = child.register_load_state_dict_pre_hook(ForwardHook(self._refuse_loading))
                handles += [enter, leave, load]
        return handles

    def begin_forward(self) -> None:
        self._drop_interrupted()
        if not self._running:
            self.release_all()
            self._forward.begin(self.flats)

    def end_forward(self, keep_last: bool) -> None:
        """`keep_last`: a backward is expected, which begins with the unit that was used last."""
        for flat in list(self._whole):
            if not (keep_last and flat is self._current):
                self._release(flat)

    def begin_backward(self) -> None:
        self._backward.begin(list(reversed(self._forward.seen)))

    def arrived(self, flat: FlatUnit) -> None:
        """All gradients of the unit have arrived: this backward does not need it any more."""
        whole = self._whole.get(flat)
        if whole is not None:
            whole.awaited = False
            self._release(flat)

    def release_all(self) -> None:
        for flat, whole in list(self._whole.items()):
            whole.awaited = False
            self._release(flat)

    def before_update(self) -> None:
        """Call it before the shards change: whole units, and what autograd saved of them, are then out of date. Raises
        InvalidUsage if someone still has a view of a parameter, whose values would be out of date."""
        self._drop_interrupted()
        self.release_all()
        self._refuse_aliases()
        self._updates += 1

    def hold_all(self) -> None:
        """Makes every unit whole, and every parameter usable, until `let_go_all`, in buffers beside the usual ones."""
        if self._held is not None:
            raise InvalidUsage("gathered() inside gathered(): parameters are whole already")
        self._drop_interrupted()
        self.release_all()
        self._usual_pools, self.pools = self.pools, {}
        for flat in self.flats:
            self._touch(flat, prefetch=False).uses += 1
            for slot in flat.unit.slots:
                self._materialize(flat, slot, flat.part)
                if slot.parameter.numel():
                    self._of_storage[storage_key(slot.parameter)] = flat
        self._held = self._watch_saved()  # a backward may come when they are gone again

    def buffer_of(self, flat: FlatUnit) -> torch.Tensor:
        """The buffer of a whole unit."""
        return self._whole[flat].buffer

    def let_go_all(self, changed: bool) -> None:
        """Ends `hold_all`. `changed`: some values differ from those that autograd saved."""
        self._held.__exit__()
        self._updates += changed
        for flat in self.flats:
            for slot in flat.unit.slots:
                self._release_parameter(slot)
            self._whole[flat].uses -= 1
        self.release_all()
        self.pools, self._held = self._usual_pools, None

    def _enter(self, own: list[tuple[FlatUnit, Slot]], module: nn.Module, _inputs: Any) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            raise InvalidUsage(
                f"{type(module).__name__} in a transform of torch.func (grad, vmap, jvp): stage 3 gathers parameters "
                "outside of transforms only: transform a copy.deepcopy() of the module that you make inside `with "
                "zero.gathered():`, or use stage 1 or 2"
            )
        self._drop_interrupted()
        running = _Running(module, _call_of_module())
        self._running.append(running)
        for flat, slot in own:
            self._touch(flat).uses += 1
            running.materialized.append((flat, slot))
            self._materialize(flat, slot, flat.view)
        running.hooks = self._watch_saved()
        running.all_hooks = _take_hooks()
        _set_hooks(running.all_hooks)

    def _drop_interrupted(self) -> None:
        """Ends forwards that an interrupt ended."""
        ended = []
        while self._running and self._running[-1].ended():
            ended.append(self._running.pop())
        if not ended:
            return
        if with_hooks := [one for one in ended if one.hooks is not None]:
            _remove_hooks(with_hooks[0].all_hooks, len(with_hooks))
        for one in ended:
            for flat, slot in one.materialized:
                self._release_parameter(slot)
                self._whole[flat].uses -= 1

    def _watch_saved(self) -> Any:
        """From now until the `__exit__` of what it returns, autograd saves parts of units as their places."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: beside_modes(self._pack, tensor, outer),
            lambda saved: beside_modes(self._unpack, saved, outer),
        )
        hooks.__enter__()
        return hooks

    def _leave(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._running or self._running[-1].module is not module:
            return  # an error before _enter
        running = self._running.pop()
        own = running.materialized
        if running.hooks is not None:
            running.hooks.__exit__()
        written = [
            slot.name for flat, slot in own if self._depth.get(slot.parameter) == 1 and self._is_written(flat, slot)
        ]
        for flat, slot in own:
            self._release_parameter(slot)
            self._whole[flat].uses -= 1
        if written:
            raise InvalidUsage(
                f"{type(module).__name__} wrote into its parameter {written[0]} in its forward, which stage 3 does not "
                "keep: compute the value without writing it (as parametrizations do), write inside `with "
                "zero.gathered():`, or use stage 1 or 2"
            )
        for tensor in tree_leaves(output):
            if self._unit_of(tensor) is not None:
                names = ", ".join(slot.name for _, slot in own)
                raise InvalidUsage(
                    f"{type(module).__name__} returns a view of its own parameter (one of {names}), which stage 3 "
                    "releases after its forward: return a copy"
                )

    def _materialize(self, flat: FlatUnit, slot: Slot, place: Callable[[Slot, torch.Tensor], torch.Tensor]) -> None:
        """`place`: gives the parameter's memory in the unit's buffer."""
        depth = self._depth.get(slot.parameter, 0)
        if depth == 0:
            restore(slot.parameter, place(slot, self._whole[flat].buffer))
            self._materialized_version[slot.parameter] = slot.parameter._version
        self._depth[slot.parameter] = depth + 1

    def _release_parameter(self, slot: Slot) -> None:
        if self._depth.get(slot.parameter, 0) == 0:
            return  # _materialize was interrupted
        self._depth[slot.parameter] -= 1
        if self._depth[slot.parameter] == 0:
            release(slot.parameter, slot.name, slot.shape)

    def _is_written(self, flat: FlatUnit, slot: Slot) -> bool:
        parameter = slot.parameter
        there = parameter.is_set_to(flat.view(slot, self._whole[flat].buffer))
        return not there or parameter._version != self._materialized_version[parameter]

    def _refuse_loading(self, module: nn.Module, *_arguments: Any) -> None:
        if any(isinstance(parameter, Released) for parameter in module.parameters(recurse=False)):
            raise InvalidUsage(
                f"load_state_dict of {type(module).__name__}, whose parameters stage 3 keeps in shards: call it inside "
                "`with zero.gathered():`"
            )

    def _unit_of(self, value: Any) -> FlatUnit | None:
        """The unit whose gathered buffer a tensor is a view of."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or isinstance(value, Released):
            return None
        if torch._is_zerotensor(value):  # forward-mode derivatives: no memory
            return None
        return self._of_storage.get(storage_key(value))

    def _pack(self, tensor: torch.Tensor, outer: Any) -> Any:
        flat = self._unit_of(tensor)
        if flat is not None and (tensor.is_conj() or tensor.is_neg()):  # more than a place
            flat, tensor = None, tensor.detach().resolve_conj().resolve_neg()
        if flat is None:
            return outer[0](tensor) if outer is not None else tensor
        offset = (_address(tensor) - _address(self._whole[flat].buffer)) // tensor.element_size()
        return _Saved(flat, self._updates, tensor.dtype, offset, tensor.size(), tensor.stride())

    def _unpack(self, saved: Any, outer: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return outer[1](saved) if outer is not None else saved
        if saved.updates != self._updates:
            names = ", ".join(slot.name for slot in saved.flat.unit.slots)
            raise InvalidUsage(
                f"backward() after step() has updated parameters that it needs ({names}): call backward() before step()"
            )
        if in_backward():
            self._on_backward()
        whole = self._touch(saved.flat)
        whole.awaited = whole.awaited or (in_backward() and saved.flat.unit.trainable)
        buffer = whole.buffer.view(saved.dtype)
        part = buffer.as_strided(saved.size, saved.stride, buffer.storage_offset() + saved.offset)
        # nobody tells when the operation is done with a frozen unit, and what it saved besides may take others first;
        # with create_graph the backward is recorded in its turn, and what it saves is not packed
        return part.clone() if not whole.awaited or torch.is_grad_enabled() else part

    def _refuse_aliases(self) -> None:
        shared = self._shared()
        if shared:
            gc.collect()
            shared = self._shared()
        self._aliased = shared
        if shared:
            names = ", ".join(slot.name for slot in shared[0][0].unit.slots)
            raise InvalidUsage(
                f"a view of a parameter that stage 3 has released (one of {names}) is still held, and would keep the "
                "values from before this update: drop it before step(), or keep a copy (parameter.detach().clone()). "
                "In an autograd.Function use ctx.save_for_backward"
            )

    def _shared(self) -> list[tuple[FlatUnit, torch.Tensor]]:
        there = [buffer for pool in self.pools.values() for buffer in pool.reclaim()]
        return [(flat, buffer) for flat, buffer in self._aliased if any(buffer is one for one in there)]

    def _touch(self, flat: FlatUnit, prefetch: bool = True) -> _Whole:
        fresh = flat is not self._current
        if fresh:
            for other in list(self._whole):
                if other is not flat:
                    self._release(other)
            self._current = flat
        whole = self._whole.get(flat) or self._start(flat)
        whole.pending.wait()
        if fresh and prefetch:
            following = (self._backward if in_backward() else self._forward).next_after(flat)
            if following is not None and following not in self._whole and self._traffic.overlap:
                self._start(following)
        return whole

    def _start(self, flat: FlatUnit) -> _Whole:
        unit = flat.unit
        key = (unit.dtype, unit.device)
        pool = self.pools.setdefault(key, Pool(*key, self._traffic.group))
        buffer = pool.borrow(unit.count)
        pending = self._traffic.all_gather(buffer, flat.shard.to(unit.device, non_blocking=True), unit.label)
        self._whole[flat] = whole = _Whole(buffer, pending)
        self._of_storage[storage_key(buffer)] = flat
        return whole

    def _release(self, flat: FlatUnit) -> None:
        whole = self._whole[flat]
        if whole.uses or whole.awaited:
            return
        whole.pending.wait()  # a gather whose parameters no module used
        del self._whole[flat]
        for key in [key for key, other in self._of_storage.items() if other is flat]:
            del self._of_storage[key]
        pool = self.pools[flat.unit.dtype, flat.unit.device]
        if storage_owners(whole.buffer) > own_tensors() + 1 and self._held is None:  # `whole.buffer` is one, too
            self._aliased.append((flat, pool.set_aside(whole.buffer)))
        else:
            pool.give_back(whole.buffer)
        if self._files is not None:
            self._files.release_pages([flat.shard])
        if self._current is flat:
            self._current = None


def _address(tensor: torch.Tensor) -> int:
    """Of the first element, also if there is none."""
    return storage_key(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def _take_hooks() -> list[tuple[Any, Any]]:
    """Takes all hooks on saved tensors away; the innermost are the last."""
    taken = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    return taken[::-1]


def _set_hooks(all_hooks: list[tuple[Any, Any]]) -> None:
    for pack, unpack in all_hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _remove_hooks(then: list[tuple[Any, Any]], count: int) -> None:
    """Removes `count` hooks on saved tensors that interrupted forwards left, of those that were set `then`. A `with`
    block that set hooks has since removed the last ones, which may not have been its own. So those left are the first,
    and behind them are those of new blocks."""
    now = _take_hooks()
    left = 0
    while left < min(len(then), len(now)) and now[left] == then[left]:
        left += 1
    _set_hooks(now[: left - count] + now[left:])
