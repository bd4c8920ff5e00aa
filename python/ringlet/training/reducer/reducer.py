"""Gradient averaging across ranks, in buckets, while backward is still running.

Gradients are parts of flat buffers, one buffer a bucket; a bucket is all-reduced as one message as soon as its last
gradient has arrived. Every rank launches its buckets in the same order, whatever the order in which its gradients
arrive. Calls torch.distributed only, so it runs on any backend. If the backend allocates tensors (`ringlet` does, in
registered memory), the buffers come from it and are reduced in place. reduction.py has the way of a gradient. Source:
PyTorch DDP (Li et al., VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from ringlet.backend import backend_of
from ringlet.errors import InvalidUsage
from ringlet.group import AnyGroup
from ringlet.training import refusals, replicas
from ringlet.training.agree import check_agreement, number_in, one_rank, refusing_together
from ringlet.training.call_labels import BucketLabels
from ringlet.training.optimizer_steps import watch_no_more
from ringlet.training.reproducible import Checks, algorithm_of, refuse_world

from .channel import Channel
from .gradient_merge import GradientMerge
from .options import Options
from .reduction import Reduction
from .stepping import InBackward


class GradientReducer(Reduction):
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
        owner = refusals.group_of(module, group, "GradientReducer")
        device = refusals.device_of(module)
        options = Options(
            bucket_mb, first_bucket_mb, algorithm, find_unused_parameters, static_graph,
            gradient_as_bucket_view, broadcast_buffers, delay, accumulate_dtype, reproducible,
        )  # fmt: skip
        settings = f"settings {options} optimizer_in_backward={optimizer_in_backward is not None}"
        check_agreement(
            [settings, *(Checks.lines() if reproducible else []), *replicas.describe(module)], owner, device
        )
        title = f"GradientReducer {number_in(owner, 'GradientReducer')} ({type(module).__name__})"
        named = [(name, p) for name, p in replicas.parameters_of(module) if p.requires_grad]
        parameters = [parameter for _, parameter in named]
        channel = Channel(owner, algorithm, BucketLabels(title, parameters))
        options.check()  # they are the same on all ranks
        channel.check_algorithm(device)
        with refusing_together(owner, device):
            refusals.refuse_unsupported(module, named)
            if reproducible:
                refuse_world(dist.get_world_size(owner), "GradientReducer")
                channel.algorithm = algorithm_of(algorithm, owner, device)
            optimizers = InBackward(named, optimizer_in_backward)
            if optimizers and delay:
                raise InvalidUsage(
                    "delay=1 returns gradients a backward later: leave out delay= or optimizer_in_backward="
                )
        super().__init__(module, named, options, channel, optimizers)
        replicas.broadcast_state(module, owner)
        world, backend = dist.get_world_size(owner), backend_of(owner, device).name()
        self._place_of_rank = f"rank {dist.get_rank(owner)} of {world} on {backend}"  # a destroyed group tells nothing
        optimizers.take_over()
        self._attach(module, parameters, self._noted.hook)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of what holds it, such as the module, holds None there."""
        return type(None), ()

    @property
    def optimizers(self) -> dict[str, list[torch.optim.Optimizer]]:
        """The optimizers in backward, by the names of their parameters."""
        return self._in_backward.optimizers

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
        parameters = [parameter for _, parameter in self._named]
        made = GradientMerge(k, average, parameters, self._group, self._finish_window, self._forget_window, self._tree)
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
        if self._options.delay and any(self._used):
            raise InvalidUsage(
                "flush() after a backward inside no_sync(): its gradients are not reduced yet: call flush() before it, "
                "or after the backward that reduces"
            )
        if self._hand_over_pending():  # remove() leaves the last averages to it
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
        return _Joining([self], enable, throw_on_early_termination, **options)

    def remove(self) -> None:
        """Takes the reducer off the module: later backwards are local. Gradients do not move."""
        if self._merge is not None:
            self._merge.check_closed("remove()")
            self._merge.remove()
        self._detach()
        self._in_backward.give_back()
        watch_no_more(self._channel.labels)

    def stats(self) -> dict[str, Any]:
        """The reducer's counts and times, as plain numbers and names.

        Times are in seconds, of the latest reduced backward and summed over all (`total_`). `communication_s`: with at
        least one bucket under way. `exposed_s`: from the end of this rank's own backward until its gradients were ready
        (with the wait for slower ranks). `overlapped_s`: the difference. `ready_s`, in `ready_order`, and the times of
        `buckets` count from the start of the backward. `merging`: for bucket_mb="measured", alpha_s and beta_s per
        byte, the predicted and measured times of both layouts, and the layout that it kept (None: not decided yet).
        """
        plan, merging = self._flat.plan, self._merging
        names = [name for name, _ in self._named]
        return {
            "algorithm": self._options.algorithm,
            "bucket_bytes": [bucket.nbytes for bucket in plan],
            "bucket_parameters": [[names[slot.index] for slot in bucket.slots] for bucket in plan],
            "rebuilt": not self._options.used_change and not self._rebuild_due,
            "merging": None if merging is None else merging.describe(),
            **self._totals.describe(names),
        }

    def __repr__(self) -> str:
        plan, totals = self._flat.plan, self._totals
        told = [
            f"{len(self._named)} parameters",
            f"{len(plan)} buckets of {sum(bucket.nbytes for bucket in plan)} bytes",
            self._place_of_rank,
            *(f"{name}={value!r}" for name, value in self._options.chosen.items()),
            *(["optimizer_in_backward"] if self._in_backward else []),
            *([repr(self._merge)] if self._merge is not None else []),
            f"{totals.backwards} backwards reduced" if self._hooks else "removed",
        ]
        return f"GradientReducer({type(self._module).__name__}: {', '.join(told)})"

    # -- for torch.distributed.algorithms.join.Join --

    def join_hook(self, **options: Any) -> JoinHook:
        self._check_attached("join()")
        options_against = self._options.delay or self._options.measured or self._options.reproducible
        if self._merge is not None or options_against or self._in_backward:
            raise InvalidUsage(
                "join() cannot be combined with accumulate(), delay=1, bucket_mb='measured', reproducible=True or an "
                "optimizer in backward"
            )
        self._divide_by_initial_world_size = options.get("divide_by_initial_world_size", True)
        return _ReducerJoinHook(self)

    def _leave_join(self) -> None:
        self._join_config = type(self._join_config).construct_disabled_join_config()

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._group


class _Joining(Join):
    """torch's own, which leaves its joinables joining if something is raised inside."""

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            for joinable in self._joinables:
                if isinstance(joinable, GradientReducer):
                    joinable._leave_join()


class _ReducerJoinHook(JoinHook):
    """A rank without inputs makes the same collectives, with zeros, for each forward and backward of the others."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def main_hook(self) -> None:
        reducer = self._reducer
        reducer._share_buffers(own_are_current=False)
        reducer._reduced_before = reducer._count_active(False) > 0
        if reducer._reduced_before:
            reducer._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies the parameters and buffers of one of the ranks with the most inputs to all ranks."""
        reducer = self._reducer
        source = one_rank(is_last_joiner, reducer._group, reducer._device)
        replicas.broadcast_state(reducer._module, reducer._group, source)
        reducer._channel.labels.restart()
        reducer._leave_join()
