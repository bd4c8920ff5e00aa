"""The optimizer over this rank's shards: it updates them in pieces, on the device of the states.

An elementwise optimizer gives an element the same update at every position, so it may run on flat pieces of the shards.
A piece lies in one unit, has one set of options and at most a sub-group's elements. If the compute type has 16 bits, a
piece is an fp32 master copy. After every update, the shard is rounded from it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.training.agree import comparable
from ringlet.training.flat import packed
from ringlet.training.reproducible import norms_over_ranks

from .gradients import UnitGradient
from .memory import MappedFiles
from .options import Offload
from .units import FlatUnit, Slot

_OPTIM = torch.optim
ELEMENTWISE = {
    _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax, _OPTIM.Adagrad, _OPTIM.Adadelta,
    _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.SGD, _OPTIM.ASGD,
}  # fmt: skip
NOT_ELEMENTWISE = {
    "LBFGS": "it needs all parameters at once and evaluates the model again",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it keeps statistics of whole rows and columns",
    "SparseAdam": "it takes sparse gradients",
    "Shampoo": "it multiplies whole matrices",
    "LAMB": "it takes norms of whole layers",
    "LARS": "it takes norms of whole layers",
}

OptionsOf = Callable[[str, nn.Parameter], dict[str, Any]]
OptionsBy = dict[nn.Parameter, dict[str, Any]]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def refuse_if_not_elementwise(optimizer_class: Any, vouched: bool) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise InvalidUsage(f"optimizer_class must be a class of torch.optim.Optimizer, got {optimizer_class!r}")
    bad = next((c.__name__ for c in optimizer_class.__mro__ if c.__name__ in NOT_ELEMENTWISE), None)
    if bad is not None:
        raise InvalidUsage(f"{optimizer_class.__name__} cannot run on flat shards: {NOT_ELEMENTWISE[bad]}")
    if optimizer_class not in ELEMENTWISE and not vouched:
        known = ", ".join(sorted(c.__name__ for c in ELEMENTWISE))
        raise InvalidUsage(
            f"{optimizer_class.__name__} is not known to update each element independently of its tensor "
            f"(known: {known}); pass elementwise=True if it does"
        )
    if hasattr(optimizer_class, "train") and hasattr(optimizer_class, "eval"):
        raise InvalidUsage(
            f"{optimizer_class.__name__} changes parameters also outside of step(), in train() and eval(): Zero would "
            "change this rank's shards alone"
        )


@dataclass(eq=False)
class Piece:
    """Elements [start, stop) of a unit's shard, which the optimizer updates as `tensor`: a view of it, or a master.

    `version`: of `tensor`, when its values were last known to Zero; another one shows that the program wrote them."""

    flat: FlatUnit
    start: int
    stop: int
    tensor: torch.Tensor
    is_master: bool
    version: int = 0

    @property
    def written(self) -> bool:
        return self.tensor._version != self.version

    def know(self) -> None:
        self.version = self.tensor._version

    def has_of(self, slot: Slot) -> bool:
        """Whether it has elements of that parameter."""
        begin = self.flat.start
        return max(slot.start, begin + self.start) < min(slot.stop, begin + self.stop)


class ShardedOptimizer:
    """`optimizer`, an `optimizer_class` over the pieces of `flats`.

    Its groups are those of `options`, in their order, also if this rank has no part of a group: schedules and
    checkpoints use a group's number, on every rank, in any world and with any limits.
    """

    def __init__(
        self,
        flats: list[FlatUnit],
        make: MakeOptimizer,
        options: OptionsBy,
        sub_group_elements: int,
        offload: tuple[Offload | None, MappedFiles | None],
    ) -> None:
        self._offload, self._files = offload
        self._make = make
        self.pieces: list[Piece] = []
        groups: dict[str, dict[str, Any]] = {key_of(given): {"params": [], **given} for given in options.values()}
        for flat in flats:
            for given, start, stop in _runs(flat, options):
                for first in range(start, stop, sub_group_elements):
                    piece = self._piece(flat, first, min(first + sub_group_elements, stop))
                    piece.know()
                    self.pieces.append(piece)
                    groups[key_of(given)]["params"].append(piece.tensor)
        self.optimizer = make(list(groups.values()))
        slots = [slot for flat in flats for slot in flat.unit.slots]
        # As the groups were made.
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._known_keys: dict[int, tuple[set[str], set[str]]] = {}
        self.group_names = [sorted(s.name for s in slots if key_of(options[s.parameter]) == key) for key in groups]
        self._lazy = not self.optimizer.state  # states are made by the first step, not with the optimizer
        self.sub_groups = list(packed(self.pieces, sub_group_elements, lambda piece: piece.stop - piece.start))
        # States and groups' entries that were made to load into: the next update drops them.
        self._made: list[Piece] = []
        self._late: list[tuple[dict[str, Any], str]] = []
        self.scratch_peak_bytes = 0
        self.update: Callable[[], None] | None = None  # what the optimizer's step does while `step` calls it
        self.called = False  # its `step` was called by the program, and not by the Zero's
        self._settle(self.pieces)

    def between_hooks(self, update: Callable[[], None]) -> None:
        """Calls `update` between the optimizer's hooks; once through what programs have wrapped its `step` in."""
        assert self.update is None
        self.update = update
        try:
            if self.called:
                self.run()
            else:
                self.optimizer.step()
        finally:
            self.update = None

    def run(self) -> None:
        assert self.update is not None
        update = self.update
        torch.optim.Optimizer.profile_hook_step(lambda *_: update())(self.optimizer)  # which runs hooks

    def step(
        self,
        gradients: dict[FlatUnit, UnitGradient],
        factor: float | torch.Tensor | None,
        done: Callable[[FlatUnit], None],
    ) -> None:
        """Updates all pieces with their gradients times the factor, a sub-group at a time; calls `done` for units as
        they are done, their shards up to date."""
        waiting = {flat: 0 for flat in gradients}
        for piece in self.pieces:
            waiting[piece.flat] += 1
            piece.tensor.grad = None
        # What the optimizer itself counts, such as a group's steps, is counted once: sub-groups start from the same.
        started = self._counts()
        for number, sub_group in enumerate(self.sub_groups):
            if number > 0:
                self._count_from(started)
            self._step(sub_group, gradients, factor)
            for piece in sub_group:
                waiting[piece.flat] -= 1
                if waiting[piece.flat] == 0:
                    done(piece.flat)

    @torch.no_grad()
    def _step(
        self, sub_group: list[Piece], gradients: dict[FlatUnit, UnitGradient], factor: float | torch.Tensor | None
    ) -> None:
        self.take_written(sub_group)
        scratch_bytes = 0
        for piece in sub_group:
            gradient = gradients[piece.flat].value[piece.start : piece.stop]
            if piece.is_master:
                # copied, so that the factor is applied before anything is rounded again
                gradient = gradient.to(piece.tensor.device, piece.tensor.dtype, copy=True)
                scratch_bytes += gradient.nbytes
            if factor is not None:
                gradient.mul_(factor.to(gradient.device) if isinstance(factor, torch.Tensor) else factor)
            piece.tensor.grad = gradient
        self.scratch_peak_bytes = max(self.scratch_peak_bytes, scratch_bytes)
        _step_without_hooks(self.optimizer)
        for piece in sub_group:
            piece.tensor.grad = None
            part = piece.flat.shard[piece.start : piece.stop]
            if piece.is_master:
                part.copy_(piece.tensor)
                piece.know()
            elif piece.tensor.data_ptr() != part.data_ptr():  # the optimizer has given it other memory
                part.copy_(piece.tensor)
                piece.tensor.data = part
        self._settle(sub_group)

    def _counts(self) -> tuple[list[dict[str, Any]], dict[str, Any], dict[Any, Any]]:
        """What the optimizer keeps that is no piece's: in its groups, as numbers of its own, and in its state."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        return groups, self._numbers(), copy.deepcopy(self._states_of_none())

    def _count_from(self, started: tuple[list[dict[str, Any]], dict[str, Any], dict[Any, Any]]) -> None:
        groups, numbers, states = started
        for group, before in zip(self.optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        for name in self._numbers():
            delattr(self.optimizer, name)
        vars(self.optimizer).update(numbers)
        for key in self._states_of_none():
            del self.optimizer.state[key]
        self.optimizer.state.update(copy.deepcopy(states))

    def _numbers(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.optimizer).items() if isinstance(value, int | float)}

    def _states_of_none(self) -> dict[Any, Any]:
        """The optimizer's states by keys that are not a piece."""
        return {key: state for key, state in self.optimizer.state.items() if not isinstance(key, torch.Tensor)}

    def elementwise_states(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The states of the piece's elements, each of the shape of `piece.tensor`."""
        state = self.optimizer.state.get(piece.tensor, {})
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == piece.tensor.shape}

    def states(self, piece: Piece) -> list[torch.Tensor]:
        """All tensors that the optimizer keeps for the piece."""
        return [v for v in self.optimizer.state.get(piece.tensor, {}).values() if isinstance(v, torch.Tensor)]

    def other_states(self, piece: Piece) -> dict[str, Any]:
        """The states of the piece as a whole, such as its number of steps."""
        state = self.optimizer.state.get(piece.tensor, {})
        return {k: v for k, v in state.items() if k not in self.elementwise_states(piece) and v is not None}

    def make_states(self) -> list[Piece]:
        """Makes the states that a first step would make, as places to load into, for pieces without states; so with
        what a first step would add to groups. The next update drops them. Returns these pieces."""
        made = []
        for piece in self.pieces:
            if not self.optimizer.state.get(piece.tensor):
                group = self.optimizer.param_groups[self._group_of(piece)]
                self.optimizer.state[piece.tensor], late = self._first_states(piece.tensor, group)
                self._late += [(group, key) for key in late]
                group.update(late)
                made.append(piece)
                self._settle([piece])
        self._made += made
        return made

    def keep_loaded(self, steps: int) -> None:
        """What was made to load into has been loaded, after so many steps. A first step is to make states itself."""
        self._made = [*self.pieces] if steps == 0 and self._lazy else []
        groups = enumerate(self.optimizer.param_groups) if self._made else ()
        self._late = [(group, key) for number, group in groups for key in self._first_keys(number)[1]]

    def drop_made(self) -> None:
        for piece in self._made:
            self.optimizer.state.pop(piece.tensor, None)
        for group, key in self._late:
            group.pop(key, None)
        self._made, self._late = [], []

    def unsaved(self) -> str | None:
        """What a checkpoint of shards does not have of the states, or a Zero which loads it would not ask for."""
        for key in self._states_of_none():
            return f"{key!r:.40}, of no parameter"
        for piece in self.pieces:
            state = {k: v for k, v in self.optimizer.state.get(piece.tensor, {}).items() if v is not None}
            names = ", ".join(slot.name for slot in piece.flat.unit.slots if piece.has_of(slot))
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    if value.shape != piece.tensor.shape and value.numel() != 1:
                        shape, elements = list(value.shape), piece.tensor.numel()
                        return f"{key!r} of {names}, a tensor of shape {shape} for a part of {elements} elements"
                elif not isinstance(value, int | float | complex | str):
                    return f"{key!r} of {names}, a {type(value).__name__}"
            late = sorted(state.keys() - self._first_keys(self._group_of(piece))[0]) if state else []
            if late:
                return f"{late[0]!r} of {names}, which its first step does not make"
        return None

    def _group_of(self, piece: Piece) -> int:
        groups = self.optimizer.param_groups
        return next(n for n, group in enumerate(groups) if any(tensor is piece.tensor for tensor in group["params"]))

    def _first_keys(self, number: int) -> tuple[set[str], set[str]]:
        """The names of what a first step makes, as `_first_states` returns it, with the options that the group was made
        with: a Zero that loads has these."""
        if number not in self._known_keys:
            states, late = self._first_states(self.pieces[0].tensor[:1], self._options[number])
            self._known_keys[number] = set(states), set(late)
        return self._known_keys[number]

    def _first_states(self, tensor: torch.Tensor, group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a first step would make: the states of `tensor`, and what is new in the group. It works on zeros, so
        that no optimizer changes a piece."""
        stand_in = torch.zeros_like(tensor)
        stand_in.grad = torch.zeros_like(stand_in)
        with torch.random.fork_rng(devices=[]):
            other = self._make([{**group, "params": [stand_in]}])
            _step_without_hooks(other)
        return other.state[stand_in], {k: v for k, v in other.param_groups[0].items() if k not in {"params", *group}}

    @torch.no_grad()
    def take_written(self, pieces: Iterable[Piece]) -> None:
        """Updates masters if others than the optimizer have written into their shards. A master takes an element that
        differs from the master's rounded value. All other elements keep their full precision, and so does a master that
        was itself written."""
        for piece in pieces:
            if not piece.is_master or piece.written:
                continue
            master = piece.tensor
            shard = piece.flat.shard[piece.start : piece.stop].to(master.device)
            rounded = master.to(shard.dtype)
            if not torch.equal(shard, rounded):
                master.copy_(torch.where(shard == rounded, master, shard.to(master.dtype)))
                piece.know()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Rounds loaded masters into the shards."""
        for piece in self.pieces:
            if piece.is_master:
                piece.know()
                piece.flat.shard[piece.start : piece.stop].copy_(piece.tensor)

    def layout_digest(self) -> str:
        """Of the elements of which parameters the pieces have: equal if their states are the same parameters'."""
        places = [
            [[slot.name, list(slot.shape), slot.start] for slot in piece.flat.unit.slots]
            + [piece.flat.start + piece.start, piece.flat.start + piece.stop]
            for piece in self.pieces
        ]
        return hashlib.sha256(repr(places).encode()).hexdigest()[:8]

    def _piece(self, flat: FlatUnit, start: int, stop: int) -> Piece:
        low = flat.shard[start:stop]
        place = torch.device("cpu") if self._offload is not None else flat.unit.device
        narrow = flat.unit.dtype.itemsize < 4
        in_file = self._files is not None and not self._files.hold(low)
        if not narrow and not in_file and low.device == place:
            return Piece(flat, start, stop, low, False)
        assert flat.initial is not None
        master = flat.initial[start:stop].to(place, torch.float32 if narrow else flat.unit.dtype, copy=True)
        if self._files is not None:
            master = self._files.copy_of(master)
        elif self._offload is not None and self._offload.pin_memory:
            master = master.pin_memory()
        return Piece(flat, start, stop, master, True)

    def _settle(self, pieces: Iterable[Piece]) -> None:
        """Moves new states to files, and releases the memory of the pieces' states there."""
        if self._files is None:
            return
        for piece in pieces:
            states = self.elementwise_states(piece)
            for key, value in states.items():
                if not self._files.hold(value):
                    self.optimizer.state[piece.tensor][key] = self._files.copy_of(value)
            self._files.release_pages([piece.tensor, *self.elementwise_states(piece).values()])


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    own_step = type(optimizer).step
    if getattr(own_step, "hooked", False):  # torch wraps it to run the hooks
        own_step = own_step.__wrapped__  # type: ignore[attr-defined]
    own_step(optimizer)


def key_of(options: dict[str, Any]) -> str:
    """Equal if the options are: what ranks compare, and what tells parameter groups apart.

    Raises InvalidUsage for an option that cannot be compared."""
    return repr(
        sorted((name, comparable(value, functools.partial(_refuse_option, name))) for name, value in options.items())
    )


def _refuse_option(name: str, kind: str) -> NoReturn:
    raise InvalidUsage(
        f"options_of: {name} is a {kind}, which ranks cannot compare: give numbers, strings or tensors, and everything "
        "else to Zero itself, for all parameters"
    )


def _runs(flat: FlatUnit, options_by: OptionsBy) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Ranges of the shard with equal options; a gap belongs to the slot before it."""
    unit = flat.unit
    options = [options_by[slot.parameter] for slot in unit.slots]
    keys = [key_of(given) for given in options]
    ends = [*(slot.start for slot in unit.slots[1:]), unit.count]
    start, shard = 0, (flat.start, flat.stop)
    for index, end in enumerate(ends):
        if index + 1 < len(ends) and keys[index + 1] == keys[index]:
            continue
        first, last = max(start, shard[0]), min(end, shard[1])
        if first < last:
            yield options[index], first - shard[0], last - shard[0]
        start = end


@torch.no_grad()
def global_norm(
    units: list[UnitGradient], scale: float | torch.Tensor, group: dist.ProcessGroup, reproducible: bool
) -> torch.Tensor:
    """The 2-norm of all gradients of all ranks times `scale`, a scalar: float64 for float64 gradients, else float32.

    Collective; the same bits on all ranks. `reproducible`: and on any number of ranks.
    """
    device = units[0].flat.unit.device
    dtype = torch.float64 if any(unit.value.dtype is torch.float64 for unit in units) else torch.float32
    if reproducible:
        return norms_over_ranks([[unit.value for unit in units]], group, device)[0].to(dtype) * scale
    norms = [torch.linalg.vector_norm(unit.value, dtype=dtype).to(device) for unit in units]
    squares = torch.stack(norms).square().sum().reshape(1)
    dist.all_reduce(squares, group=group)
    return squares.sqrt()[0] * scale
