"""Changes of a module between two calls of its Zero: Zero follows them if that has a meaning, else refuses them.

Zero follows new values of parameters: it puts rank 0's into every rank's shards. It refuses, on all ranks in the same
way, other trained parameters and another shape, dtype or device, because it makes units once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.training.flat import same_place
from ringlet.training.module_watch import ModuleWatch
from ringlet.training.replicas import broadcast_tensors

from .gather import Residency
from .optimizer import Piece
from .traffic import Traffic
from .units import FlatUnit, Slot

_version_of = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_is_contiguous = torch.Tensor.is_contiguous
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Changes:
    """A parameter's values have changed if autograd counts a change, or if the parameter has other memory. A write
    through `parameter.data` is neither: `gathered` finds it by a digest of the values; elsewhere every rank keeps its
    own shard of it.

    `sync_written` checks parameters of whole units, which can be written at any time. `gathered` checks all parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        flats: list[FlatUnit],
        pieces: list[Piece],
        residency: Residency | None,
        traffic: Traffic,
    ) -> None:
        self._module, self._pieces = module, pieces
        self._residency, self._traffic = residency, traffic
        self._places = {slot.parameter: (flat, slot) for flat in flats for slot in flat.unit.slots}
        self._trained = [(s.name, s.parameter) for flat in flats if flat.unit.trainable for s in flat.unit.slots]
        self._whole = [p for p, (flat, _) in self._places.items() if flat.whole is not None]
        moving = [p for p, (flat, _) in self._places.items() if flat.whole is None]
        self._watch = ModuleWatch(module, "Zero", self._trained, traffic.group, moving, (nn.DataParallel,))
        self._gathering = False
        self.renew()

    def renew(self) -> None:
        """Records the current values of the parameters as known."""
        self._versions = list(map(_version_of, self._whole))
        for piece in self._pieces:
            if not piece.is_master:  # a master is the optimizer's
                piece.know()

    def refuse_owned(self) -> None:
        """Call it before a forward that trains, and before gathered(): for what was written into the optimizer's own
        tensors, this rank's parts, since the parameters have been those of all ranks. A part from which parameters are
        gathered may be written."""
        lost = (piece.written for piece in self._pieces if piece.is_master or piece.flat.whole is not None)
        if any(lost) and not self._gathering:
            self._watch.refuse(
                "the parameters of zero.optimizer, which are this rank's parts, were written after a step or before "
                "gathered(), and the module's would keep the old values: write them between a backward and its step(), "
                "or write the module's parameters, on every rank or inside gathered(). After a load or an update that "
                "did not end, load again"
            )

    def sync_written(self) -> None:
        """Call it before a forward that trains, an update and a checkpoint. Collective if values have changed."""
        if self._gathering:
            return
        self._watch.refuse_ddp()
        if self._watch.same():
            if list(map(_version_of, self._whole)) == self._versions and all(map(_is_contiguous, self._whole)):
                return
        else:
            self._watch.refuse_change()
            self._refuse_shared()
        written = self._written()
        if any(written.values()):
            self._keep(written, [])
        self._watch.take()

    def refuse_frozen(self) -> None:
        """Call it before an update, which would update a frozen parameter as if its gradient were zero."""
        if all(map(_requires_grad, (p for _, p in self._trained))):
            return
        name = next(name for name, p in self._trained if not p.requires_grad)
        self._watch.refuse(
            f"parameter {name} was frozen (requires_grad=False) after Zero was made, and step() would still change it "
            "by weight decay and momentum: unfreeze it, or call remove() and make a new Zero"
        )

    def pending(self) -> bool:
        """Whether this rank has written values that `sync_written` has not taken."""
        return any(self._written().values())

    def _written(self) -> dict[nn.Parameter, bool]:
        """The parameters of whole units, and whether this rank has written each since `renew`."""
        return {p: self._has_changed(p, before) for p, before in zip(self._whole, self._versions, strict=True)}

    def refuse_gathered(self, call: str) -> None:
        """What is written inside gathered() is in the shards of all ranks only after it."""
        if self._gathering:
            raise InvalidUsage(f"{call} inside gathered(): call it after the `with` block")

    @contextmanager
    def gathered(self) -> Iterator[list[nn.Parameter]]:
        """All parameters are whole inside. Keeps rank 0's changes: at the begin those of whole units since `renew`, at
        the end those made inside. Yields a list that then has the parameters changed inside. Collective."""
        self.refuse_owned()
        if self._residency is not None:
            self._residency.hold_all()
        kept: list[nn.Parameter] = []
        try:
            if self._whole:
                self._keep(self._written(), [])
            others = [p for p in self._module.parameters() if p not in self._places or self._places[p][0].whole is None]
            before = {p: p._version for p in (*self._whole, *others)}
            digests = {p: _digest(p) for p in before}
            aside = {p: _place_of(p) for p in others if p not in self._places}
            self._gathering = True
            yield kept
            self._watch.refuse_change()
            changed = {
                p: self._has_changed(p, version)
                or (p in aside and _place_of(p) != aside[p])
                or _digest(p) != digests[p]
                for p, version in before.items()
            }
            self._keep(changed, kept)
        finally:
            self._gathering = False
            if self._residency is not None:
                self._residency.let_go_all(bool(kept))

    @torch.no_grad()
    def _keep(self, changed: dict[nn.Parameter, bool], kept: list[nn.Parameter]) -> None:
        """Takes rank 0's values of the parameters that changed on any rank, and puts these parameters into `kept`."""
        here = list(map(int, changed.values()))
        rows = [here, here if self._traffic.rank == 0 else [0] * len(here)]
        everyone = torch.tensor(rows, dtype=torch.int32, device=next(iter(changed)).device)
        try:
            dist.all_reduce(everyone, dist.ReduceOp.MAX, group=self._traffic.group)
        except InvalidUsage as error:
            written = ", ".join(self._name_of(p) for p, yes in changed.items() if yes)
            raise InvalidUsage(
                f"only some ranks wrote to these parameters: {written}. Write them on every rank, or inside "
                f"`with zero.gathered():`, where rank 0 alone may write. Cause: {error}"
            ) from error
        anywhere, on_rank_0 = everyone.tolist()
        kept += [p for p, taken in zip(changed, anywhere, strict=True) if taken]
        for parameter in kept:
            if parameter in self._places:
                self._take(*self._places[parameter])
            else:
                broadcast_tensors([parameter], self._traffic.group)
                torch.autograd.graph.increment_version(parameter)
        self._versions = list(map(_version_of, self._whole))
        renewed = {self._places[p][0] for p in kept if p in self._places}
        for piece in self._pieces:
            if piece.flat in renewed and not piece.is_master:
                piece.know()
        missed = [p for p, yes, first in zip(changed, anywhere, on_rank_0, strict=True) if yes and not first]
        if missed:
            where = "inside gathered()" if self._gathering else "by other than Zero's calls"
            raise InvalidUsage(
                f"parameter {self._name_of(missed[0])} was changed {where}, but not on rank 0: change it on rank "
                "0, whose values every rank takes"
            )

    def _take(self, flat: FlatUnit, slot: Slot) -> None:
        values = self._values_of(flat)[slot.start : slot.stop]
        if not same_place(slot.parameter, values.view(slot.shape)):
            values.copy_(slot.parameter.detach().reshape(-1).clone())  # which may be another view of the same memory
            if flat.whole is not None:
                flat.give_part(slot)
            else:
                slot.parameter.data = flat.part(slot, self._values_of(flat))
        broadcast_tensors([values], self._traffic.group)
        torch.autograd.graph.increment_version(slot.parameter)  # the flat buffer has a counter of its own
        if flat.whole is None:
            _copy_common(flat.shard, flat.start, values, slot.start)

    def _values_of(self, flat: FlatUnit) -> torch.Tensor:
        if flat.whole is not None:
            return flat.whole
        assert self._residency is not None
        return self._residency.buffer_of(flat)

    def _has_changed(self, parameter: nn.Parameter, version: int) -> bool:
        if parameter._version != version:
            return True
        if parameter not in self._places:
            return False
        flat, slot = self._places[parameter]
        return not same_place(parameter, flat.view(slot, self._values_of(flat)))

    def _name_of(self, parameter: nn.Parameter) -> str:
        if parameter in self._places:
            return self._places[parameter][1].name
        return next((name for name, p in self._module.named_parameters() if p is parameter), "?")

    # -- what cannot be followed --

    def _refuse_shared(self) -> None:
        shared = next((slot.name for flat, slot in self._places.values() if flat.is_shared(slot)), None)
        if shared is not None:
            self._watch.refuse(
                f"the memory of parameter {shared} was shared with processes (share_memory_(), or sent through "
                "torch.multiprocessing), where Zero's updates would not be seen: share or send a copy "
                "(parameter.detach().clone())"
            )


def _place_of(parameter: nn.Parameter) -> tuple[int, tuple[int, ...]]:
    return parameter.data_ptr(), parameter.stride()


@torch.no_grad()
def _digest(parameter: torch.Tensor) -> int:
    """A number for the bytes of the values and their order. It differs if one element does, and else nearly surely."""
    values = parameter.detach().resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    words = values.reshape(-1).view(_INTEGERS[values.element_size()])
    factors = _factors(parameter.device)
    digest = 0
    for part in words.split(factors.numel()):
        digest = (digest * 0x9E3779B97F4A7C15 + int((part.long() * factors[: part.numel()]).sum())) % (1 << 64)
    return digest


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd, so that no difference of one element vanishes modulo 2^64. As many as leave products in the cache."""
    drawn = torch.randint(1 << 62, (1 << 15,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 1).to(device)


def _copy_common(to: torch.Tensor, to_start: int, values: torch.Tensor, start: int) -> None:
    """Copies the elements that both have; they begin at `to_start` and at `start` of one unit."""
    first, last = max(to_start, start), min(to_start + to.numel(), start + values.numel())
    if first < last:
        to[first - to_start : last - to_start].copy_(values[first - start : last - start])
