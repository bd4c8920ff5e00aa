"""Gradient averaging across ranks, in buckets, while backward is still running.

Gradients are parts of flat buffers, one buffer a bucket; a bucket is all-reduced as one message as soon as its last
gradient has arrived. Every rank launches its buckets in the same order, whatever the order in which its gradients
arrive. Calls torch.distributed only, so it runs on any backend. If the backend allocates tensors (`ringlet` does, in
registered memory), the buffers come from it and are reduced in place. Source: PyTorch DDP (Li et al., VLDB 2020).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ringlet.errors import InvalidUsage
from ringlet.group import AnyGroup
from ringlet.renamed import renamed_argument
from ringlet.training import replicas
from ringlet.training.backward import Backward, differentiable
from ringlet.training.call_labels import BucketLabels, number_in
from ringlet.training.gradient_hooks import ForwardHook, HooksLast, on_gradient
from ringlet.training.module_watch import ModuleWatch
from ringlet.training.optimizer_steps import call_no_more
from ringlet.training.refusals import device_of, group_of, refuse_stopped, shared_with_ddp
from ringlet.training.reproducible import Checks, algorithm_of, refuse_world

from . import refusals, trace
from .channel import Channel
from .draw_timeline import draw
from .joining import ReducerJoinHook, active_ranks, one_rank
from .measured import MeasuredMerging
from .options import Options
from .reduction import Reduction
from .stepping import Stepping
from .window import GradientMerge


class GradientReducer(Joinable):
    """Averages a module's gradients over the ranks of a group, during `loss.backward()`.

    Use the module unchanged. After `reducer = GradientReducer(model)`, `loss.backward()` leaves in every
    `parameter.grad` the average over all ranks of the gradients since the last reduction, with the earlier value of
    `.grad`. `zero_grad` works both ways. The constructor copies rank 0's parameters and buffers to all ranks. It leaves
    out those that the module names in `_ddp_params_and_buffers_to_ignore`.

    Args:
        module: any module with dense parameters of any floating or complex dtypes and devices. The reducer leaves out
            parameters that require no gradient at construction, and reduces shared parameters once.
        group: a group of torch.distributed or a ringlet.Group, by default the whole world.
        bucket_mb: largest bucket in MiB; a larger parameter is a bucket of its own. Or "measured": 25 at first. In the
            first 25 reduced backwards the reducer times the group and the model, cuts buckets by MG-WFBP's model (Shi
            et al., INFOCOM 2019), and keeps the faster of both layouts.
        first_bucket_mb: the same for each dtype's and device's first bucket: small, so that communication starts early.
        algorithm: the ringlet algorithm of the all-reduces ("ring", "butterfly", ...), by default the group's own.
        find_unused_parameters: parameters may get no gradient in a backward. A rank without a gradient contributes its
            `.grad` (or zero) to the average; if no rank has a gradient, `.grad` stays untouched. Costs one
            small all-reduce per backward, and no bucket with an unused parameter overlaps with backward.
        static_graph: every backward does what the first reduced one does: a gradient may arrive several times
            (reentrant checkpoints), and parameters may be unused, at no cost after the first. Replaces
            `find_unused_parameters`. With reentrant checkpoints the module's output must be a tensor, or tensors in
            containers or dataclasses: the reducer detects the start of a backward by their gradients.
        gradient_as_bucket_view: `.grad` is a view of its bucket (two ranks on one host need none, and reduce it where
            autograd has put it). If False, `.grad` is a tensor of its own, and the
            reducer copies gradients both ways.
        broadcast_buffers: before a forward with gradients enabled, copy rank 0's buffers to all ranks, unless the
            previous forward was not reduced. (DDP does so without gradients too, and a rank that evaluates alone
            hangs.)
        optimizer_in_backward: makes an optimizer of a list of one parameter. The optimizer steps as soon as the
            parameter's bucket is reduced. Its gradient is None after the backward. `reducer.optimizers` has the
            optimizers by name.
        delay: 1 returns the averages of the previous backward, so that communication has a whole step to finish. The
            first backward leaves None in `.grad`. `flush()` returns the last averages.
        accumulate_dtype: in which 16-bit gradients add up over a window of no_sync() or accumulate(): float32 by
            default, in 4 bytes an element while the window is open. Their own dtype takes no memory, but a sum of many
            micro-batches is wrong.
        reproducible: training gives the same bits on 1, 2, 4, 8 ... ranks (docs/gradients.md says what that needs of
            the model). `accumulate(k)` with k = N / world, a power of two, gives each rank its part of a window of N
            micro-batches (`micro_batches` of its result). Gradients are added along one binary tree over all N, and
            divided by N. Until a window closes `.grad` is as before it, which must be None or zero. Costs log2 k
            copies of the gradients, and needs the ringlet backend.

    Raises:
        InvalidUsage: at construction, if ranks differ in a parameter, buffer or setting (it names rank and parameter);
            if no parameter requires a gradient; if a parameter gets sparse gradients, is on the meta device, or has
            another owner (DDP, FSDP, a reducer, a Zero); if options are wrong or exclude each other; or if `algorithm`
            is given on another backend. From a forward, if the module is in a DDP, or if parameters that require
            gradients came, went, or have another shape, dtype or device: call `remove()` and make a new reducer. From
            `backward`, if parameters got no gradient and may not be unused (it names them; the other ranks' reduction
            still completes, without this rank's part), or if a gradient arrives again after its bucket was sent.
        PeerLost, Timeout, ResourceError: from `backward`, as the group's backend raises them.

    The module keeps its reducer, and both are freed together. If a part of the module is still in use, a later gradient
    raises InvalidUsage: no reducer would average it.

    A rank whose backward reaches no parameter takes no part in that reduction, and the others wait for it. On `ringlet`
    its next backward raises InvalidUsage on all ranks if it has called `optimizer.step()` like the others.
    Not thread-safe: one backward at a time. Higher derivatives do not flow through the averaged gradients.
    """

    @renamed_argument("process_group", "group")
    def __init__(
        self,
        module: torch.nn.Module,
        *,
        group: AnyGroup | None = None,
        bucket_mb: float | str = 25,
        first_bucket_mb: float = 1,
        algorithm: str | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        optimizer_in_backward: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        delay: int = 0,
        accumulate_dtype: torch.dtype | None = None,
        reproducible: bool = False,
    ) -> None:
        super().__init__()
        self._module, self._group = module, group_of(module, group, "GradientReducer")
        refusals.refuse_optimizer(optimizer_in_backward)
        self._device = device_of(module)
        self._options = Options(
            bucket_mb, first_bucket_mb, algorithm, find_unused_parameters, static_graph,
            gradient_as_bucket_view, broadcast_buffers, delay, accumulate_dtype, reproducible,
        )  # fmt: skip
        settings = f"settings {self._options} optimizer_in_backward={optimizer_in_backward is not None}"
        alike = [settings, *(Checks.lines() if reproducible else []), *replicas.describe(module)]
        replicas.check_agreement(alike, self._group, self._device)
        title = f"GradientReducer {number_in(self._group, 'GradientReducer')} ({type(module).__name__})"
        self._options.check()
        named = [(name, p) for name, p in replicas.parameters_of(module) if p.requires_grad]
        refusals.refuse_unsupported(module, named)
        self._channel = Channel(self._group, algorithm, BucketLabels(title, [parameter for _, parameter in named]))
        self._channel.check_algorithm(self._device)
        self._checks: Checks | None = None
        if reproducible:
            refuse_world(dist.get_world_size(self._group), "GradientReducer")
            self._checks = Checks(module, "GradientReducer")
            self._channel.algorithm = algorithm_of(algorithm, self._group, self._device)
        stepping = Stepping(named, optimizer_in_backward)
        if stepping.active and delay:
            raise InvalidUsage("delay=1 returns gradients a backward later: leave out delay= or optimizer_in_backward=")
        replicas.broadcast_state(module, self._group)

        self.optimizers = stepping.optimizers
        self._named = named
        self._reduction = Reduction(named, self._options, self._channel, stepping)
        if self._options.measured:
            self._reduction.merging = MeasuredMerging(self._reduction.flat.entries, self._channel, self._device)
        self._begin()
        self._add_hooks(module)

    def _begin(self) -> None:
        """The state before the first forward."""
        world, backend = dist.get_world_size(self._group), dist.get_backend(self._group)
        self._place = f"rank {dist.get_rank(self._group)} of {world} on {backend}"  # a destroyed group does not tell it
        self._watch = ModuleWatch(self._module)
        self._checked = False  # since the latest backward
        self._sync = True
        self._merge: GradientMerge | None = None
        self._backward = Backward()
        self._reducing = False
        self._reduced_before = True  # the latest forward's gradients were to be reduced
        self._divide_by_initial_world_size = True
        self._active = world  # ranks that still have inputs

    def _add_hooks(self, module: torch.nn.Module) -> None:
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(ForwardHook(self._before_forward)),
            module.register_forward_hook(ForwardHook(self._after_forward)),
        ]
        self._last = HooksLast()
        for index, (_, parameter) in enumerate(self._named):
            wrapped = functools.partial(self._reduction.noted.hook, index)
            self._hooks.append(on_gradient(parameter, self._on_gradient, index, wrapped=wrapped))
            self._last.add(parameter, self._hooks[-1])

    # -- what a training loop calls --

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside add up on this rank; the next backward of a forward outside averages the sums.

        As with DDP, the forward decides. Put the backward inside, too: if a backward does not come from the output of
        the module's forward, its own place decides. All ranks must do the same.
        """
        self._check_attached("no_sync()")
        if self._merge is not None:
            raise InvalidUsage("no_sync() after accumulate(), which counts micro-batches already: use one of the two")
        if self._checks is not None:
            raise InvalidUsage("no_sync() with reproducible=True, which counts micro-batches: call accumulate(k)")
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def accumulate(self, k: int, average: bool = True) -> GradientMerge:
        """Gradient merge: from now on, reduces gradients once for every `k` backwards. The last of these overlaps.

        The reducer averages gradients over ranks. With `average` it divides them by the number of micro-batches;
        otherwise it sums over micro-batches. With `k` = 1 it reduces every backward again, but still refuses no_sync()
        and join(). Returns the counter (see GradientMerge), which says when the optimizer may step.

        Raises:
            InvalidUsage: for a `k` below 1, inside `no_sync()` or `join()`, or while a window is open; after a backward
                that stopped before its end, as the next forward would; after `remove()`.
        """
        self._check_attached("accumulate()")
        if not self._sync or self._join_config.enable:
            raise InvalidUsage("accumulate() inside no_sync() or join(): each decides when gradients are reduced")
        self._check_stopped()
        made = GradientMerge(
            k, average, self._named, self._group, self._finish_window, check=self._check_finish,
            tree=self._reduction.tree,
        )  # fmt: skip
        if self._merge is not None:
            self._merge.check_closed("accumulate()")
            self._merge.remove()
        self._merge = made
        return made

    def flush(self) -> bool:
        """With delay=1: waits for the last averages and puts them into `.grad`. Returns whether there were any.

        Raises InvalidUsage if gradients of backwards that are not reduced yet are in `.grad`: they would be lost; after
        `remove()`, if there are no averages.
        """
        self._check_stopped()
        if self._merge is not None:
            self._merge.check_closed("flush()")
        if any(self._reduction.used):
            raise InvalidUsage(
                "flush() after a backward inside no_sync(): its gradients are not reduced yet: call flush() before it, "
                "or after the backward that reduces"
            )
        if self._reduction.flush():  # remove() leaves the last averages to it
            return True
        self._check_attached("flush()")
        return False

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Replaces the all-reduce of each bucket by `hook(state, bucket) -> Future[Tensor]`, as DDP's method does.

        The hooks of torch.distributed.algorithms.ddp_comm_hooks run unchanged; `bucket` is a GradBucket
        (comm_hooks.py). A hook averages by itself. The next bucket's hook runs when the future is complete. This moment
        differs between ranks, so other communication in a backward needs a group of its own.

        Raises:
            InvalidUsage: if there is a hook already, or an option that needs plain all-reduces; after `remove()`.
        """
        self._check_attached("register_comm_hook()")
        if self._channel.hooked:
            raise InvalidUsage("register_comm_hook: this reducer has a communication hook already: make a new reducer")
        if self._options.measured or self._options.algorithm is not None or self._options.reproducible:
            raise InvalidUsage(
                "register_comm_hook: a hook excludes bucket_mb='measured', algorithm= and reproducible=True: leave "
                "them out"
            )
        if not callable(hook):
            raise InvalidUsage(f"register_comm_hook: hook must be callable, got a {type(hook).__name__}")
        self._channel.set_hook(state, hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for ranks with different numbers of inputs: a rank that has no more takes part with zeros.

        It works as DDP's, by torch.distributed.algorithms.join, which also takes this reducer together with other
        joinables. Averages are over the initial number of ranks, or over the ranks that still have inputs. At the end,
        every rank holds the parameters and buffers of a rank with the most inputs. It costs two small all-reduces per
        forward.

        Raises:
            InvalidUsage: with accumulate(), delay=1, bucket_mb="measured" or an optimizer in backward; after
                `remove()`.
        """
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **options)

    def remove(self) -> None:
        """Takes the reducer off the module: later backwards are local. Gradients do not move."""
        if self._merge is not None:
            self._merge.check_closed("remove()")
            self._merge.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        call_no_more(self._channel.labels)

    def stats(self) -> dict[str, Any]:
        """The reducer's counts and times, as plain numbers and names.

        Times are in seconds, of the latest reduced backward and summed over all (`total_`). `communication_s`: with at
        least one bucket under way. `exposed_s`: from the end of this rank's own backward until its gradients were ready
        (with the wait for slower ranks). `overlapped_s`: the difference. `ready_s`, in `ready_order`, and the times of
        `buckets` count from the start of the backward. `merging`: for bucket_mb="measured", alpha_s and beta_s per
        byte, the predicted and measured times of both layouts, and the layout that it kept (None: not decided yet).
        """
        reduction = self._reduction
        flat, merging = reduction.flat, reduction.merging
        return {
            "algorithm": self._options.algorithm,
            "bucket_bytes": [bucket.nbytes for bucket in flat.plan],
            "bucket_parameters": [flat.names([slot.index for slot in bucket.slots]) for bucket in flat.plan],
            "rebuilt": not self._options.used_change and not reduction.rebuild_due,
            "merging": None if merging is None else merging.describe(),
            **reduction.totals.describe([name for name, _ in self._named]),
        }

    def plot_timeline(self, path: str | os.PathLike[str]) -> None:
        """Draws the latest reduced backward: gradients, buckets and communication over time.

        The ending of `path` chooses the format (.svg, .png, .pdf). Raises InvalidUsage before the first reduction and
        if matplotlib is not installed, ResourceError if it cannot write.
        """
        draw(self.stats(), path, dist.get_rank(self._group))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the latest reduced backward as a trace for chrome://tracing and ui.perfetto.dev (.json).

        Rows: the backward, the gradients as they were ready, the exposed time, the buckets under way. The files of one
        host's ranks have one clock. Raises InvalidUsage before the first reduction, ResourceError if it cannot write.
        """
        trace.save(self._reduction.totals.latest, [name for name, _ in self._named], dist.get_rank(self._group), path)

    def __repr__(self) -> str:
        plan, totals = self._reduction.flat.plan, self._reduction.totals
        told = [
            f"{len(self._named)} parameters",
            f"{len(plan)} buckets of {sum(bucket.nbytes for bucket in plan)} bytes",
            self._place,
            *(f"{name}={value!r}" for name, value in self._options.chosen.items()),
            *(["optimizer_in_backward"] if self.optimizers else []),
            *([repr(self._merge)] if self._merge is not None else []),
            f"{totals.backwards} backwards reduced" if self._hooks else "removed",
        ]
        return f"GradientReducer({type(self._module).__name__}: {', '.join(told)})"

    # -- one backward: output's gradient, parameters' gradients, end --

    def _before_forward(self, called: torch.nn.Module, _inputs: Any) -> None:
        if called is not self._module or not torch.is_grad_enabled():  # copy.copy(module) shares its hooks
            return
        self._check_stopped()
        self._check_module()
        if self._checks is not None:
            self._checks.before_forward()
        if self._merge is not None:
            self._merge.check_gradients()
        joining = self._join_config.enable
        notice = Join.notify_join_context(self)
        if notice is not None:
            notice.wait()
        self._share_buffers(own_are_current=True)
        reduced = self._sync and (self._merge is None or self._merge.seen + 1 == self._merge.k)
        if joining:
            self._active = active_ranks(reduced, self._group, self._device)
        self._reduced_before = reduced

    def _after_forward(self, called: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if called is not self._module or not torch.is_grad_enabled():
            return
        sync = self._sync
        for tensor in differentiable(output):
            tensor.register_hook(lambda _: self._on_backward(sync))

    def _on_backward(self, sync: bool, arrived: int | None = None) -> None:
        """`sync`: whether the forward came outside of no_sync(). `arrived`: see Reduction.open."""
        self._check_stopped()
        if self._backward.open:
            return
        if not self._checked:  # no forward of the whole module came before
            self._check_module()
        self._backward.begin(self._on_backward_end)
        self._open(sync, arrived)
        if self._reduction.sums.apart:
            self._backward.at_end(self._reduction.sums.end)
        if self._checks is not None:
            self._backward.at_end(self._reduction.put_back)
        if self._reduction.in_place:
            self._backward.make_registered()

    def _open(self, sync: bool, arrived: int | None) -> None:
        self._last.keep()
        self._reducing = sync if self._merge is None else self._merge.closes()
        self._channel.labels.begin(self._join_config.enable)
        self._reduction.open(self._reducing, arrived)
        if self._join_config.enable and not self._divide_by_initial_world_size:
            self._reduction.scale = dist.get_world_size(self._group) / max(1, self._active)
        if self._merge is None:  # it has to see the first gradient of a backward
            self._reduction.arm()

    def _on_gradient(self, index: int) -> None:
        self._on_backward(self._sync, index)
        if self._merge is not None:
            self._merge.begin()
            if self._reducing and not self._merge.gathering:
                self._reduction.scale = self._merge.gather(self._merge.seen + 1)
        self._reduction.arrived(index, self._named[index][1])
        if not self._reduction.noted.armed:
            self._reduction.arm()

    def _on_backward_end(self) -> None:
        try:
            if self._reduction.anything_arrived:  # else torch.autograd.grad, which leaves .grad alone
                self._close()
        finally:
            self._rearm()

    def _close(self) -> None:
        wrong = self._reduction.close()
        self._reduction.put_back()
        if self._merge is not None:
            if self._reducing:
                self._merge.end()
            else:
                self._merge.count()
        if wrong:
            named, rank = [self._named[index] for index in wrong], dist.get_rank(self._group)
            refusals.refuse_gradients(named, len(self._named), rank, self._options.static_graph)
        if self._reduction.earlier:
            refusals.refuse_earlier_values([self._named[index][0] for index in self._reduction.earlier])

    def _finish_window(self, scale: float) -> None:
        """Reduces the gradients of a window, outside of a backward."""
        self._reducing = True
        self._channel.labels.begin()
        self._reduction.open(True)
        self._reduction.scale = scale
        try:
            self._close()
        finally:
            self._rearm()

    def _check_stopped(self) -> None:
        """Drops the gradients of a backward that raised before its end. Call it before anything that would use them."""
        if self._backward.stopped:
            self._abandon()

    def _check_finish(self) -> None:
        """Before the finish() of a window."""
        self._check_attached("finish()")
        self._check_stopped()

    def _check_attached(self, call: str) -> None:
        if not self._hooks:
            raise InvalidUsage(f"{call}: the reducer was removed: make a new one")

    def _check_module(self) -> None:
        """Refuses a module whose gradients the reducer would not average, or which another owner averages too."""
        wrong = shared_with_ddp(self._named, "GradientReducer")
        if wrong is None and not self._watch.same():
            change = self._watch.change()
            if change is not None:
                wrong = (
                    f"the module changed after the GradientReducer was made ({change}): call remove() and make a new "
                    "GradientReducer, on every rank"
                )
            elif all(isinstance(p, torch.nn.Parameter) for p in self._module.parameters()):
                self._watch.take()
        if wrong is not None:
            replicas.refuse_together(wrong, self._group, self._device)
        self._checked = True

    def _abandon(self) -> None:
        """A backward raised before its end. Raises InvalidUsage if buckets had been sent."""
        launched, of = self._reduction.sent()
        arrived = self._reduction.anything_arrived
        if arrived:
            self._reduction.drop_window()
        self._rearm()
        if launched:
            if self._merge is not None:
                self._merge.forget()
            refuse_stopped(dist.get_rank(self._group), launched, of, "buckets")
        if self._merge is not None:
            self._merge.abandon(arrived)

    def _rearm(self) -> None:
        self._backward.close()
        self._checked = False
        self._reduction.rearm()

    # -- buffers and uneven inputs --

    def _share_buffers(self, own_are_current: bool) -> None:
        if not self._options.broadcast_buffers or not self._reduced_before or not self._watch.has_buffers:
            return
        source = 0
        if self._join_config.enable:
            source = one_rank(own_are_current, self._group, self._device)
        replicas.broadcast_buffers(self._module, self._group, source)

    def shadow_step(self) -> None:
        """For a rank without inputs (joining.py): takes part in one forward and backward of the others."""
        self._share_buffers(own_are_current=False)
        self._reduced_before = active_ranks(False, self._group, self._device) > 0
        if self._reduced_before:
            self._reduction.shadow()
            self._reduction.rearm()

    def copy_state_from_one(self, candidate: bool) -> None:
        """At the end of join(): the highest rank that is a `candidate` gives its parameters and buffers to all."""
        replicas.broadcast_state(self._module, self._group, one_rank(candidate, self._group, self._device))
        self._channel.labels.restart()
        self._join_config = type(self._join_config).construct_disabled_join_config()

    def join_hook(self, **options: Any) -> JoinHook:
        """For torch.distributed.algorithms.join.Join."""
        self._check_attached("join()")
        options_against = self._options.delay or self._options.measured or self._options.reproducible
        if self._merge is not None or options_against or self.optimizers:
            raise InvalidUsage(
                "join() cannot be combined with accumulate(), delay=1, bucket_mb='measured', reproducible=True or an "
                "optimizer in backward"
            )
        self._divide_by_initial_world_size = options.get("divide_by_initial_world_size", True)
        return ReducerJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._group
