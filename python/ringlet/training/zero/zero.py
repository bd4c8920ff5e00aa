"""ZeRO: the model's states in shards over the ranks of a group (Rajbhandari et al., SC 2020, arXiv 1910.02054)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.group import AnyGroup
from ringlet.training import replicas
from ringlet.training.agree import check_agreement, comparable, number_in, refusing_together
from ringlet.training.optimizer_steps import watch_no_more, watch_steps
from ringlet.training.refusals import device_of, group_of
from ringlet.training.reproducible import Checks, numbers_of, refuse_fused, refuse_world

from . import checkpoint
from .memory import MappedFiles, storage_bytes
from .optimizer import (
    ELEMENTWISE,
    OptionsBy,
    OptionsOf,
    ShardedOptimizer,
    global_norm,
    key_of,
    refuse_if_not_elementwise,
)
from .options import Offload, Options, offload_of, refuse_max_norm
from .reduction import ShardReduction
from .refusals import options_by_parameter, refuse_unsupported
from .released import restore
from .step_calls import patch_optimizer_step
from .traffic import Traffic
from .units import FlatUnit, assign, give_labels


class Zero(ShardReduction):
    """Trains a module with its states divided over the ranks of a group, so that each rank keeps 1/N of them.

        zero = ringlet.Zero(model, torch.optim.AdamW, stage=2, dtype=torch.bfloat16, lr=1e-3)
        for inputs, targets in batches:
            loss_of(model(inputs), targets).backward()
            zero.step()

    Stage 1 divides optimizer states and masters, stage 2 gradients too, stage 3 parameters too. Use the module
    unchanged. A backward (at stage 1 the last one of a window) leaves the average over ranks of all gradients in
    shards. `parameter.grad` shows it: torch's functions can read its norm, and change it in place. If a parameter got
    no gradient, its gradient counts as zero. The constructor copies rank 0's parameters and buffers to all ranks, and
    moves the parameters to flat buffers. If the group's backend allocates tensors, the buffers come from it.

    Args:
        module: a module whose trainable parameters are bfloat16, float32 or float64 and get dense gradients.
        optimizer_class: an elementwise torch optimizer, with the arguments `optimizer_defaults`.
        stage: 1, 2 or 3.
        group: a group of torch.distributed or a ringlet.Group, by default the whole world.
        dtype: dtype of the parameters and floating buffers for computation; by default their own. With bfloat16 the
            optimizer updates float32 masters, made from the values before conversion.
        accumulate: micro-batches of a window. Call `step` after each; it updates after the last. Stage 1 communicates
            once a window, stages 2 and 3 in every backward.
        average: divide the window's sum by the number of its micro-batches.
        accumulate_dtype: in which bfloat16 gradients of a window add up: float32 by default. bfloat16 takes half the
            memory, but a sum of more than about 100 micro-batches is wrong.
        max_norm: clip the global norm of each window's gradients to this.
        options_of: (name, parameter) -> options of its optimizer group, such as {"weight_decay": 0.0}.
        bucket_elements, gather_elements: a unit is reduced and gathered as one message. It has at most as many elements
            as the smaller of the two; a larger parameter is a unit of its own.
        sub_group_elements: the optimizer updates so many elements at a time. This limits the fp32 copies of gradients.
        persistence_elements: stage 3 keeps parameters of at most so many elements whole on every rank.
        overlap: communicate while computing, with prefetch at stage 3; else wait for every message at once.
        offload_optimizer, offload_parameters (stage 3): "cpu" or an `Offload`.
        reproducible: training gives the same bits on 1, 2, 4, 8 ... ranks and at every stage (docs/zero.md says what
            that needs of the model), if `accumulate` is N / world, a power of two, and each rank takes
            the micro-batches `micro_batches` of a window of N. They are added along one binary tree, and divided by N.
            Costs a buffer of a unit, and log2 `accumulate` copies of the gradients (stages 2 and 3: of this rank's
            shards). Of norms it has those of order 2 and inf, whose bits do not depend on the ranks either.
        print_every, print_times: rank 0 prints a line every so many steps, with the times of its phases.
        elementwise: vouches for an optimizer class that is not known to be elementwise.

    Raises InvalidUsage before anything moves if the module, optimizer or settings cannot be right or differ between
    ranks; PeerLost, Timeout and ResourceError as the group's backend raises them. Not thread-safe. All ranks must run
    the same modules in the same order, and make the same calls of `step`.
    """

    steps = 0

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        stage: int = 1,
        *,
        group: AnyGroup | None = None,
        dtype: torch.dtype | None = None,
        accumulate: int = 1,
        average: bool = True,
        accumulate_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        options_of: OptionsOf | None = None,
        bucket_elements: int = 1 << 23,
        gather_elements: int = 1 << 23,
        sub_group_elements: int = 1 << 24,
        persistence_elements: int = 10_000,
        overlap: bool = True,
        offload_optimizer: Offload | str | None = None,
        offload_parameters: Offload | str | None = None,
        print_every: int = 0,
        print_times: bool = False,
        reproducible: bool = False,
        elementwise: bool = False,
        **optimizer_defaults: Any,
    ) -> None:
        owner = group_of(module, group, "Zero")

        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return optimizer_class(groups, **optimizer_defaults)

        with refusing_together(owner, device_of(module)):
            refuse_if_not_elementwise(optimizer_class, elementwise)
            options = Options(
                stage, dtype, accumulate, average, accumulate_dtype, max_norm, bucket_elements, gather_elements,
                sub_group_elements, persistence_elements, overlap, offload_of("offload_optimizer", offload_optimizer),
                offload_of("offload_parameters", offload_parameters), print_every, print_times, reproducible,
                f"{optimizer_class.__name__} {comparable(optimizer_defaults)}",
            )  # fmt: skip
            refuse_unsupported(module, options)
            if reproducible:
                refuse_world(dist.get_world_size(owner), "Zero")
            checks = Checks(module, "Zero") if reproducible else None
            options_by = options_by_parameter(module, options_of, make)
            if reproducible:
                refuse_fused([optimizer_defaults, *options_by.values()])
        traffic = Traffic(owner, overlap)
        offloads = (options.offload_optimizer, options.offload_parameters)
        # of the optimizer's offloaded tensors, and of the parameters'
        self._files = [MappedFiles(o.path) if o is not None and o.path is not None else None for o in offloads]
        flats = _make_flats(module, options, traffic, options_by, self._files[1])
        trained = [flat for flat in flats if flat.unit.trainable]
        offload = (options.offload_optimizer, self._files[0])
        sharded = ShardedOptimizer(trained, make, options_by, sub_group_elements, offload)
        for flat in flats:
            flat.initial = None
        super().__init__(module, options, traffic, flats, sharded, self._files[1], checks)
        patch_optimizer_step(sharded, traffic.rank, self.step, self._zero_grad_after_step)
        watch_steps(self._shown)
        residency_hooks = [] if self._residency is None else self._residency.attach(module)
        self._attach(module, self._parameters, always_call=True)
        self._hooks += residency_hooks

    def __repr__(self) -> str:
        told, options = self._memory(), self.options
        slots = [slot for unit in self._units for slot in unit.flat.unit.slots]
        held = f"{told['total']} bytes held" + (f" and {told['file']} in files" if told["file"] else "")
        elements = sum(slot.stop - slot.start for slot in slots)
        chosen = {name: value for name, value in options.chosen().items() if name not in ("stage", "optimizer")}
        settings = "".join(f", {name}={value!r}" for name, value in chosen.items())
        return (
            f"Zero(stage={options.stage}, rank {self._traffic.rank} of {self._traffic.world}, {options.optimizer}, "
            f"{len(slots)} trained parameters of {elements} elements in {len(self._units)} units, {held}, "
            f"steps={self.steps}, micro-batch {self._window.seen} of {options.accumulate}{settings})"
        )

    def _memory(self) -> dict[str, int]:
        """Bytes of the storages of model states, by kind. Storages in files count under "file" only."""
        kept = [file for file in self._files if file is not None]
        kinds = {
            "parameters": [flat.whole if flat.whole is not None else flat.shard for flat in self._flats],
            "gradients": [tensor for unit in self._units for tensor in unit.tensors()],
            "master": [piece.tensor for piece in self._sharded.pieces if piece.is_master],
            "optimizer": [state for piece in self._sharded.pieces for state in self._sharded.states(piece)],
        }
        held, in_files = {}, []
        for kind, tensors in kinds.items():
            outside = [tensor for tensor in tensors if not any(file.hold(tensor) for file in kept)]
            in_files += [tensor for tensor in tensors if any(file.hold(tensor) for file in kept)]
            held[kind] = storage_bytes(outside)
        return {**held, "total": sum(held.values()), "file": storage_bytes(in_files)}

    @property
    def micro_batches(self) -> range:
        """The numbers of this rank's micro-batches in a window, of the `accumulate` times world of all ranks, in order.

        At stage 1 a rank's numbers follow each other; at stages 2 and 3, which reduce in every backward, those of a
        backward do. With `reproducible=True` training depends on the micro-batches in the order of these numbers, and
        not on the number of ranks.
        """
        traffic, options = self._traffic, self.options
        return numbers_of(traffic.rank, traffic.world, options.accumulate, by_rank=options.stage == 1)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's shards, for learning-rate schedules and for loops that step an optimizer.

        Its `step` (also with a closure) and `zero_grad` are those of the Zero. Only `zero_grad` after a `step` that did
        not end the window keeps the window. It refuses loss scaling, which bfloat16 does not need.
        """
        return self._sharded.optimizer

    def step(self, partial: bool = False) -> bool:
        """Updates the parameters if the window is full, and returns whether it did. Call it after every backward.

        `partial` ends a window that is not full, such as the last one of an epoch. Averages then divide by the number
        of its micro-batches. If there are none, it updates nothing. Collective when it updates, and with `partial` if
        `accumulate` is more than 1.

        Raises InvalidUsage after `remove()`, as do `clip_grad_norm_`, `gathered`, `state_dict` and `load_state_dict`.
        """
        if not isinstance(partial, bool):
            raise InvalidUsage(
                f"step: partial must be True or False, got {partial!r:.60}: call zero.optimizer.step(closure) with a "
                "closure"
            )
        self._check_attached("step()")
        self._changes.refuse_gathered("step()")
        self._check_stopped()
        self._take_exchanged()
        if self._window.seen == 0 and not partial:
            raise InvalidUsage("step() without a backward since the last step(): there are no gradients")
        self._window.stepped_at = self._window.seen
        if not self._window.full and not partial:
            return False
        if self._checks is not None and not self._window.full and self._window.seen:
            raise InvalidUsage(
                f"step(partial=True) {self._window.told()}: with reproducible=True every window is full: call "
                "zero_grad(), which drops it"
            )
        if self._window.seen == 0 and self.options.accumulate == 1:
            return False
        if self.options.reproducible:
            with refusing_together(self._traffic.group, self._flats[0].unit.device):
                refuse_fused(self.optimizer.param_groups)
        self._changes.sync_written()
        self._changes.refuse_frozen()
        self._clock.start("step")
        try:
            self._complete_window()
            if self.options.accumulate > 1:  # each rank scales its own shard by its own number of micro-batches
                counts = self._window.compare(self._window.seen).wait()
                self._window.refuse_unequal(counts, "Nothing was updated: call zero_grad() on every rank")
            if self._window.seen == 0:  # on every rank
                self._begin_window()
                return False
            if self.options.max_norm is not None:
                self._clip(self.options.max_norm)
            self._update()
        finally:
            self._clock.stop("step")
        self._clock.end_window()
        if self.options.print_every and self.steps % self.options.print_every == 0 and self._traffic.rank == 0:
            print(self._clock.line(self.steps, self.optimizer, self.options.print_times), flush=True)
        return True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The 2-norm of all gradients of the window, a scalar. The next `step` scales them to at most `max_norm`.

        It works as `torch.nn.utils.clip_grad_norm_` on the averaged gradients, also when it is called again; `inf`
        scales nothing. Collective, and possible only when the window is full.
        """
        self._check_attached("clip_grad_norm_()")
        refuse_max_norm(max_norm)
        self._take_exchanged()
        if not self._window.full:
            raise InvalidUsage(
                f"clip_grad_norm_ {self._window.told()}: the gradients are not complete: pass max_norm= to Zero, which "
                "clips complete gradients"
            )
        return self._clip(max_norm)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside. If rank 0 changes a parameter, also through `.data`, every rank takes its
        values, masters included. Collective; other ranks may change what rank 0 changes.

        Raises InvalidUsage for a parameter that only other ranks change.
        """
        self._check_attached("gathered()")
        with self._changes.gathered() as kept:
            yield
        if kept:
            self._mark_changed()

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint, whose `save` and `load` also take the Zero itself:

            dcp.save({"zero": zero}, checkpoint_id=folder)
            dcp.load({"zero": zero}, checkpoint_id=folder)   # any world, stage and limits

        {"model": ..., "optimizer": {"state", "param_groups"}, "steps"}: this rank's part of the parameters and states,
        by parameter name, in the parameters' own shapes. Parameters are the float32 masters if there are any.
        """
        self._check_attached("state_dict()")
        self._changes.refuse_gathered("state_dict()")
        if self._window.seen and not self._window.spent:
            raise InvalidUsage(
                f"state_dict() {self._window.told()}: a checkpoint has no gradients: save after a step() that updated, "
                "call step(partial=True), which updates with these gradients, or zero_grad(), which drops them"
            )
        self._refuse_unsaved()
        self._changes.sync_written()
        replicas.broadcast_buffers(self.module, self._traffic.group)
        self._sharded.take_written(self._sharded.pieces)
        made = self._sharded.make_states()
        if self.steps and any(map(self._sharded.states, made)):
            warnings.warn(
                f"state_dict(): the optimizer has no states after {self.steps} steps: what is saved has those of a "
                "first step without gradients. Training goes on without them",
                stacklevel=2,
            )
        return {
            "model": checkpoint.model_state(self.module, self._flats, self._sharded),
            "optimizer": checkpoint.optimizer_state(self._flats, self._sharded),
            "steps": self.steps,
        }

    def _refuse_unsaved(self) -> None:
        """On all ranks, as pieces of some ranks only may have what a checkpoint cannot have."""
        if type(self.optimizer) in ELEMENTWISE:
            return
        why = self._sharded.unsaved()
        found = self._window.compare(int(why is not None)).wait()
        if any(found):
            why = why or f"what rank {found.index(1)} names"  # its parts only may have it
            raise InvalidUsage(
                f"state_dict(): the optimizer keeps {why}: a checkpoint has states that a first step makes, tensors of "
                "the parameter's shape or of one element, numbers and strings"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the values that torch.distributed.checkpoint loaded into `state_dict()`. Collective.

        If it refuses what was loaded, the parameters and moments have the loaded values nevertheless, on every rank.
        """
        self._check_attached("load_state_dict()")
        self._changes.refuse_gathered("load_state_dict()")
        if self._window.seen and self._changes.pending():  # what was written is kept
            raise InvalidUsage(
                "load_state_dict() between a backward and its step(), with parameters written since: call zero_grad(), "
                "and write and load again"
            )
        if self._residency is not None:
            self._residency.before_update()
        try:
            if self._window.seen:
                raise InvalidUsage(
                    "load_state_dict() between a backward and its step(): call zero_grad(), which drops the gradients "
                    "of the old parameters, and load again"
                )
            checkpoint.load_optimizer_state(state["optimizer"], self._sharded)
            self.steps = state["steps"]
            self._sharded.keep_loaded(self.steps)
        finally:
            self._take_loaded()

    def _take_loaded(self) -> None:
        """The shards were loaded in place."""
        self._sharded.round_masters()
        try:
            for flat in self._flats:
                if flat.whole is not None:
                    self._traffic.all_gather(flat.whole, flat.shard, flat.unit.label).wait()
        finally:
            self._mark_changed()

    def remove(self) -> None:
        """Takes the Zero off the module: its parameters are whole and ordinary, and backwards local. Collective."""
        self._detach()
        watch_no_more(self._shown)
        self._shown.hide()
        if self._residency is not None:
            self._residency.hold_all()
            slots = [slot for flat in self._in_shards for slot in flat.unit.slots]
            whole = [(slot.parameter, slot.parameter.detach().clone()) for slot in slots]
            self._residency.let_go_all(False)
            for parameter, values in whole:
                restore(parameter, values)
            self._residency = None

    def stats(self) -> dict[str, Any]:
        """This rank's memory, bytes sent and times, as plain numbers.

        `memory`: bytes of the tensors of model states, by kind, outside of files; `file`: in files. `buffers`: the
        largest number of bytes borrowed for whole parameters and gradients of units, of whole units at one time, and of
        bytes for a sub-group's float32 gradients. `communication`: the least bytes that were sent, see traffic.py.
        Times are in seconds, of the latest window. `exposed_s`: blocked in communication (on a GPU only the host's part
        of it).
        """
        return {
            "stage": self.options.stage,
            "world": self._traffic.world,
            "steps": self.steps,
            "units": [(unit.count, [slot.name for slot in unit.slots]) for unit in (flat.unit for flat in self._flats)],
            "memory": self._memory(),
            "buffers": self._buffers(),
            "communication": {
                "gathered_bytes": self._traffic.gathered_bytes,
                "reduced_bytes": self._traffic.reduced_bytes,
                "sent_bytes": self._traffic.gathered_bytes + self._traffic.reduced_bytes,
                "collectives": self._traffic.collectives,
            },
            **self._clock.seconds(),
        }

    def _buffers(self) -> dict[str, int]:
        gathers = list(self._residency.pools.values()) if self._residency is not None else []
        return {
            "gather_peak_bytes": sum(pool.peak_bytes for pool in gathers),
            "gather_peak_units": max((pool.peak_live for pool in gathers), default=0),
            "gradient_peak_bytes": sum(pool.peak_bytes for pool in self._pools.values()),
            "sub_group_peak_bytes": self._sharded.scratch_peak_bytes,
        }

    # -- a step --

    def _clip(self, max_norm: float) -> torch.Tensor:
        multiplier = self._window.multiplier()
        norm = global_norm(self._units, multiplier, self._traffic.group, self.options.reproducible)
        before = 1.0 if self._window.factor is None else self._window.factor
        self._window.factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) * before
        return norm

    @torch.no_grad()
    def _update(self) -> None:
        if self._residency is not None:
            self._residency.before_update()
        self._sharded.drop_made()
        self._window.updating = True
        try:
            self._sharded.between_hooks(self._update_parameters)
        finally:
            self._window.updating = False
            if self._window.spent:  # also if something raised since
                self._begin_window()

    def _update_parameters(self) -> None:
        """With what hooks before it have left of the gradients; hooks after it find the parameters up to date."""
        self._take_exchanged()
        multiplier = self._window.multiplier()
        factor = multiplier if isinstance(multiplier, torch.Tensor) or multiplier != 1.0 else None
        gathers = []
        done = False

        def gather(flat: FlatUnit) -> None:
            if flat.whole is not None:
                gathers.append(self._traffic.all_gather(flat.whole, flat.shard, flat.unit.label))

        self._window.spent = True
        try:
            self._sharded.step({u.flat: u for u in self._units}, factor, gather)
            done = True
        finally:
            self.steps += 1
            first_counts = contextlib.nullcontext() if done else contextlib.suppress(Exception)
            with first_counts, contextlib.ExitStack() as waits:  # for all, also if Ctrl-C ends one
                waits.callback(self._mark_changed)
                for pending in gathers:
                    waits.callback(pending.wait)

    def _mark_changed(self) -> None:
        """Makes autograd refuse a backward through old values. (The flat buffers have counters of their own.)"""
        for flat in self._flats:
            if flat.whole is not None:
                for slot in flat.unit.slots:
                    torch.autograd.graph.increment_version(slot.parameter)
        self._changes.renew()


@torch.no_grad()
def _make_flats(
    module: nn.Module, options: Options, traffic: Traffic, options_by: OptionsBy, files: MappedFiles | None
) -> list[FlatUnit]:
    """Copies rank 0's values to all ranks and moves them to flat buffers. Collective."""
    group = traffic.group
    given = [f"options of {name}: {key_of(options_by[p])}" for name, p in module.named_parameters() if p in options_by]
    given += Checks.lines() if options.reproducible else []
    check_agreement([*options.lines(), *replicas.describe(module), *given], group, next(module.parameters()).device)
    replicas.broadcast_state(module, group)
    values = {id(p): p.data for p in module.parameters()}
    if options.dtype is not None:
        module._apply(lambda tensor: tensor.to(options.dtype) if tensor.is_floating_point() else tensor)
    largest = min(options.bucket_elements, options.gather_elements)
    units = assign(module, largest, options.persistence_elements, traffic.world)
    give_labels(units, number_in(group, "Zero"))
    flats = []
    for unit in units:
        if not unit.trainable and options.stage < 3:
            continue
        whole = options.stage < 3 or unit.small
        flat = FlatUnit(unit, [values.pop(id(slot.parameter)) for slot in unit.slots], whole, group)
        if options.offload_parameters is not None and not whole:
            flat.offload(options.offload_parameters, files)
        flats.append(flat)
    return flats
