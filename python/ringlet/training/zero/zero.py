"""ZeRO: the model's states in shards over the ranks of a group (Rajbhandari et al., SC 2020, arXiv 1910.02054)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.group import AnyGroup
from ringlet.renamed import renamed, renamed_argument
from ringlet.training import replicas
from ringlet.training.backward import Backward, differentiable, in_backward
from ringlet.training.gradient_hooks import ForwardHook
from ringlet.training.refusals import group_of, refuse_stopped
from ringlet.training.reproducible import Checks, numbers_of, refuse_world

from . import checkpoint
from .build import build
from .changes import Changes
from .gather import Residency
from .gradients import Gradients
from .optimizer import OptionsOf, Piece, global_norm, refuse_if_not_elementwise
from .options import Offload, Options, offload_of, refuse_max_norm
from .refusals import options_by_parameter, refuse_unsupported, refusing_alike
from .released import restore
from .report import Clock, communication, describe, memory
from .sharded_gradient import ShownGradients
from .shards import FlatUnit
from .step_calls import lead_to_zero, refuse_other_optimizers
from .traffic import Traffic
from .window import Window


class Zero:
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

    @renamed_argument("process_group", "group")
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
        self.module = module
        self._group = group_of(module, group, "Zero")
        make = functools.partial(_make_optimizer, optimizer_class, optimizer_defaults)
        with refusing_alike(module, self._group):
            refuse_if_not_elementwise(optimizer_class, elementwise)
            self.options = Options(
                stage, dtype, accumulate, average, accumulate_dtype, max_norm, bucket_elements, gather_elements,
                sub_group_elements, persistence_elements, overlap, offload_of("offload_optimizer", offload_optimizer),
                offload_of("offload_parameters", offload_parameters), print_every, print_times, reproducible,
                f"{optimizer_class.__name__} {optimizer_defaults}",
            )  # fmt: skip
            refuse_unsupported(module, self.options)
            if reproducible:
                refuse_world(dist.get_world_size(self._group), "Zero")
            self._checks = Checks(module, "Zero") if reproducible else None
            options_by = options_by_parameter(module, options_of, make)
        self._traffic = Traffic(self._group, overlap)
        self._parts = build(module, self.options, self._traffic, make, options_by)
        self._residency: Residency | None = None
        if stage == 3:
            self._residency = Residency(self._parts.in_shards, self._traffic, self._parts.files[1], self._open_backward)
        self._gradients = Gradients(
            self._parts.trainable, self.options, self._traffic, self._on_gradient, self._on_arrived
        )
        self._window = Window(self.options, self._gradients.units, self._traffic.world)
        self._shown = ShownGradients(self._gradients.units, self._parts.sharded, self._group, self._window)
        self._placeholders: list[Piece] = []  # whose states were made to load into
        self._clock = Clock(self._traffic)
        self._backward = Backward()
        self._changes = Changes(module, self._parts, self._residency, self._traffic)
        self._hooks = self._attach()

    def __repr__(self) -> str:
        progress = (self.steps, self._window.micro_batches)
        return describe(self._parts, self._gradients, self.options, self._traffic, progress)

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
        return self._parts.sharded.optimizer

    def step(self, partial: bool = False) -> bool:
        """Updates the parameters if the window is full, and returns whether it did. Call it after every backward.

        `partial` ends a window that is not full, such as the last one of an epoch. Averages then divide by the number
        of its micro-batches. If there are none, it updates nothing. Collective when it updates, and with `partial` if
        `accumulate` is more than 1.

        Raises InvalidUsage after `remove()`, as do `clip_grad_norm_`, `gathered` and `load_state_dict`.
        """
        self._refuse_removed("step()")
        self._changes.refuse_gathered("step()")
        self._abandon()
        self._take_exchanged()
        if self._window.micro_batches == 0 and not partial:
            raise InvalidUsage("step() without a backward since the last step(): there are no gradients")
        self._window.stepped_at = self._window.micro_batches
        if not self._window.full and not partial:
            return False
        if self._checks is not None and not self._window.full and self._window.micro_batches:
            raise InvalidUsage(
                f"step(partial=True) after {self._window.micro_batches} of {self.options.accumulate} micro-batches: "
                "with reproducible=True every window is full: call zero_grad(), which drops it"
            )
        if self._window.micro_batches == 0 and self.options.accumulate == 1:
            return False
        self._changes.follow()
        self._changes.refuse_frozen()
        with self._clock.phase("step"):
            self._complete_window()
            if self.options.accumulate > 1:
                self._compare_windows()
            if self._window.micro_batches == 0:  # on every rank
                self._begin_window()
                return False
            if self.options.max_norm is not None:
                self._clip(self.options.max_norm)
            self._update()
        self.steps += 1
        self._clock.end_window()
        if self.options.print_every and self.steps % self.options.print_every == 0 and self._traffic.rank == 0:
            print(self._clock.line(self.steps, self.optimizer, self.options.print_times), flush=True)
        return True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The 2-norm of all gradients of the window, a scalar. The next `step` scales them to at most `max_norm`.

        It works as `torch.nn.utils.clip_grad_norm_` on the averaged gradients, also when it is called again; `inf`
        scales nothing. Collective, and possible only when the window is full.
        """
        self._refuse_removed("clip_grad_norm_()")
        refuse_max_norm(max_norm)
        self._take_exchanged()
        if not self._window.full:
            raise InvalidUsage(
                f"clip_grad_norm_ after {self._window.micro_batches} of {self.options.accumulate} micro-batches: the "
                "gradients are not complete: pass max_norm= to Zero, which clips complete gradients"
            )
        return self._clip(max_norm)

    clip_grad_norm = renamed("Zero.clip_grad_norm", clip_grad_norm_)

    def _zero_grad_after_step(self) -> None:
        """`zero_grad` for loops that call it after every micro-batch."""
        if not self._window.stepped:
            self.zero_grad()

    def zero_grad(self) -> None:
        """Drops the gradients of the window. Not needed after `step`."""
        self._begin_window()
        for unit in self._gradients.units:
            for slot in unit.flat.unit.slots:
                slot.parameter.grad = None

    def _begin_window(self) -> None:
        self._window.begin()
        self._gradients.begin_window()
        self._shown.hide()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside. If rank 0 changes a parameter, also through `.data`, every rank takes its
        values, masters included. Collective; other ranks may change what rank 0 changes.

        Raises InvalidUsage for a parameter that only other ranks change.
        """
        self._refuse_removed("gathered()")
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
        self._changes.refuse_gathered("state_dict()")
        if self._window.micro_batches:
            raise InvalidUsage(
                f"state_dict() after {self._window.micro_batches} of {self.options.accumulate} micro-batches: a "
                "checkpoint has no gradients: save after a step() that updated, call step(partial=True), which updates "
                "with these gradients, or zero_grad(), which drops them"
            )
        self._changes.follow()
        replicas.broadcast_buffers(self.module, self._group)
        self._parts.sharded.take_written(self._parts.sharded.pieces)
        made = self._parts.sharded.make_states()
        if self.steps == 0:
            self._placeholders = self._placeholders or made
        return {
            "model": checkpoint.model_state(self.module, self._parts.flats, self._parts.sharded),
            "optimizer": checkpoint.optimizer_state(self._parts.flats, self._parts.sharded),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the values that torch.distributed.checkpoint loaded into `state_dict()`. Collective.

        If it refuses what was loaded, the parameters and moments have the loaded values nevertheless, on every rank.
        """
        self._refuse_removed("load_state_dict()")
        self._changes.refuse_gathered("load_state_dict()")
        if self._window.micro_batches and self._changes.pending():  # what was written is kept
            raise InvalidUsage(
                "load_state_dict() between a backward and its step(), with parameters written since: call zero_grad(), "
                "and write and load again"
            )
        if self._residency is not None:
            self._residency.before_update()
        try:
            if self._window.micro_batches:
                raise InvalidUsage(
                    "load_state_dict() between a backward and its step(): call zero_grad(), which drops the gradients "
                    "of the old parameters, and load again"
                )
            checkpoint.load_optimizer_state(state["optimizer"], self._parts.sharded)
            self.steps = state["steps"]
            # from before a first step, which is to make the states
            self._placeholders = self._parts.sharded.pieces if self.steps == 0 and self._parts.sharded.lazy else []
        finally:
            self._take_loaded()

    def _take_loaded(self) -> None:
        """The shards were loaded in place."""
        self._parts.sharded.round_masters()
        for flat in self._parts.flats:
            if flat.whole is not None:
                self._traffic.all_gather(flat.whole, flat.shard, flat.unit.label).wait()
        self._mark_changed()

    def remove(self) -> None:
        """Takes the Zero off the module: its parameters are whole and ordinary, and backwards local. Collective."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._shown.hide()
        if self._residency is not None:
            self._residency.hold_all()
            slots = [slot for flat in self._parts.in_shards for slot in flat.unit.slots]
            whole = [(slot.parameter, slot.parameter.detach().clone()) for slot in slots]
            self._residency.let_go_all(False)
            for parameter, values in whole:
                restore(parameter, values)
            self._residency = None

    def _refuse_removed(self, call: str) -> None:
        if not self._hooks:
            raise InvalidUsage(f"{call}: the Zero was removed: make a new one")

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
            "units": [
                (unit.count, [slot.name for slot in unit.slots]) for unit in (flat.unit for flat in self._parts.flats)
            ],
            "memory": memory(self._parts.flats, self._gradients, self._parts.sharded, self._parts.files),
            "buffers": self._buffers(),
            "communication": communication(self._traffic),
            **self._clock.seconds(),
        }

    def _buffers(self) -> dict[str, int]:
        gathers = list(self._residency.pools.values()) if self._residency is not None else []
        return {
            "gather_peak_bytes": sum(pool.peak_bytes for pool in gathers),
            "gather_peak_units": max((pool.peak_live for pool in gathers), default=0),
            "gradient_peak_bytes": sum(pool.peak_bytes for pool in self._gradients.pools.values()),
            "sub_group_peak_bytes": self._parts.sharded.scratch_peak_bytes,
        }

    def _attach(self) -> list[Any]:
        lead_to_zero(self._parts.sharded, self._traffic.rank, self.step, self._zero_grad_after_step)
        refuse_other_optimizers()
        hooks = self._gradients.attach()
        if self._residency is not None:
            hooks += self._residency.attach(self.module)
        before = self.module.register_forward_pre_hook(ForwardHook(self._on_forward), prepend=True)
        after = self.module.register_forward_hook(ForwardHook(self._on_forward_end), always_call=True)
        return [*hooks, before, after]

    # -- a pass: forward, the gradients of its outputs, the end of backward --

    def _on_forward(self, module: nn.Module, _inputs: Any) -> None:
        if module is not self.module or in_backward():  # copy.copy(module) shares its hooks
            return
        self._abandon()
        if torch.is_grad_enabled():
            if self._checks is not None:
                self._checks.before_forward()
            self._changes.follow()
        self._clock.start("forward")
        if self._residency is not None:
            self._residency.begin_forward()

    def _on_forward_end(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if module is not self.module or in_backward():
            return
        attached = differentiable(output)
        for tensor in attached:
            tensor.register_hook(lambda _: self._open_backward())
        if self._residency is not None:
            self._residency.end_forward(keep_last=bool(attached))
        self._clock.stop("forward")

    def _open_backward(self, arrived: torch.Tensor | None = None) -> None:
        """`arrived`: a parameter whose gradient of this backward has arrived."""
        if not in_backward():
            return
        self._abandon(late=arrived is not None)
        if self._backward.open:
            return
        self._take_exchanged(arrived)
        self._backward.begin(self._on_backward_end)
        self._shown.hide()
        self._clock.start("backward")
        if self._residency is not None:
            self._residency.begin_backward()
        self._gradients.open(self.options.stage > 1 or self._window.micro_batches + 1 >= self.options.accumulate)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._open_backward(parameter)
        full, window = self._window.micro_batches, self.options.accumulate
        if full >= window and (window > 1 or self._checks is not None):
            raise InvalidUsage(f"{full + 1} backwards in a window of {window}: call step() after every backward")

    def _on_arrived(self, flat: FlatUnit) -> None:
        if self._residency is not None:
            self._residency.arrived(flat)

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        try:
            if self._residency is not None:
                self._residency.release_all()
            if self._gradients.finish(self._gradients.reducing):  # else torch.autograd.grad, which leaves .grad alone
                self._window.count()
        finally:
            if self._window.micro_batches:
                self._shown.show()
            self._backward.close()
            self._clock.stop("backward")

    def _abandon(self, late: bool = False) -> None:
        """Drops the gradients of a backward that raised before its end. Raises InvalidUsage if units had been sent or,
        at stage 1, if gradients are in the sums of a window. `late`: a gradient of the next backward has arrived."""
        if not self._backward.stopped:
            return
        launched, of = self._gradients.launched, len(self._gradients.units)
        self._backward.close()
        if self._residency is not None:
            self._residency.release_all()
        whole = self._gradients.abandon(late)
        if whole and not launched:
            if self._window.micro_batches and not late:
                self._shown.show()
            return
        self.zero_grad()
        if launched:
            refuse_stopped(self._traffic.rank, launched, of, "units")
        raise InvalidUsage(
            f"rank {self._traffic.rank}: the previous backward stopped after it had added to the gradients of this "
            "window, so Zero dropped them: begin the window again; call zero_grad() after a backward that raised"
        )

    # -- a step --

    def _take_exchanged(self, arrived: torch.Tensor | None = None) -> None:
        """Takes what the program has put into `.grad` since the latest backward. `arrived`: a parameter that has a
        gradient of a new backward instead."""
        if self._window.micro_batches == 0:
            return
        changed = self._shown.changed()
        if not changed:
            return
        if self._shown.dropped(arrived):
            self._zero_grad_after_step()
            if self._window.micro_batches and arrived is None:
                self._shown.show()
            return
        why = self._window.unfinished()
        if arrived is not None and arrived.grad is not None and arrived in self._shown.exchanged(changed):
            why = "that autograd has added to what the program had put there: call step() before"
        if why is not None:
            raise InvalidUsage(f"the gradient of {self._shown.names(changed)} was exchanged, a gradient {why}")
        self._window.fold()
        self._shown.take(changed)

    def _compare_windows(self) -> None:
        """Each rank scales its own shard by its own number of micro-batches."""
        own = torch.tensor([self._window.micro_batches], device=self._parts.flats[0].unit.device)
        counts = [torch.empty_like(own) for _ in range(self._traffic.world)]
        dist.all_gather(counts, own, group=self._group)
        seen = [int(count) for count in counts]
        if len(set(seen)) > 1:
            told = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(seen))
            raise InvalidUsage(
                f"ranks ended a window with different numbers of micro-batches: {told}. Nothing was updated: call "
                "zero_grad() on every rank, and give every rank the same number of micro-batches"
            )

    def _complete_window(self) -> None:
        """Reduces the rest of a window that ends early."""
        if any(not unit.holds for unit in self._gradients.units):
            self._shown.hide()
            self._gradients.reduce_all()
            self._gradients.rearm()
            self._shown.show()

    def _clip(self, max_norm: float) -> torch.Tensor:
        multiplier = self._window.multiplier()
        norm = global_norm(self._gradients.units, multiplier, self._group, self.options.reproducible)
        before = 1.0 if self._window.factor is None else self._window.factor
        self._window.factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) * before
        return norm

    def _before_update(self) -> float | torch.Tensor | None:
        """Takes what hooks on the optimizer have done. Returns the factor of the shards' values."""
        self._take_exchanged()
        multiplier = self._window.multiplier()
        return multiplier if isinstance(multiplier, torch.Tensor) or multiplier != 1.0 else None

    @torch.no_grad()
    def _update(self) -> None:
        if self._residency is not None:
            self._residency.before_update()
        if self.steps == 0 and self._placeholders:
            self._parts.sharded.drop_states(self._placeholders)
        self._placeholders = []
        gathers = []

        def gather(flat: FlatUnit) -> None:
            if flat.whole is not None:
                gathers.append(self._traffic.all_gather(flat.whole, flat.shard, flat.unit.label))

        self._window.updating = True
        try:
            self._parts.sharded.step({u.flat: u for u in self._gradients.units}, self._before_update, gather)
        finally:
            self._window.updating = False
        for pending in gathers:
            pending.wait()
        self._mark_changed()
        self._begin_window()

    def _mark_changed(self) -> None:
        """Makes autograd refuse a backward through old values. (The flat buffers have counters of their own.)"""
        for flat in self._parts.flats:
            if flat.whole is not None:
                for slot in flat.unit.slots:
                    torch.autograd.graph.increment_version(slot.parameter)
        self._changes.renew()


def _make_optimizer(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    return optimizer_class(groups, **defaults)
