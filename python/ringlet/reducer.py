"""Gradient averaging across ranks, in buckets, while backward is still running.

Gradients are views of flat buffers, one buffer a bucket; a bucket is all-reduced as one message as soon as its last
gradient has arrived. Every rank launches its buckets in the same order, whatever the order in which its gradients
arrive. Speaks torch.distributed only, so it runs on any backend; where the backend allocates tensors (`ringlet` does:
registered memory) the buffers come from it and are reduced where they lie. Source: PyTorch DDP (Li et al., VLDB 2020).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from . import buckets, replicas
from .errors import InvalidUsage
from .flat_gradients import FlatGradients

_now_ns = time.perf_counter_ns
_MIB = 1 << 20


@dataclass
class _Times:
    """Nanoseconds of the latest reduced backward and the sums over all of them."""

    backwards: int = 0
    launches: int = 0
    communication: int = 0
    exposed: int = 0
    total_communication: int = 0
    total_exposed: int = 0
    ready_order: list[int] = field(default_factory=list)


class GradientReducer:
    """Averages a module's gradients over the ranks of a group, during `loss.backward()`.

    The module is used unchanged: after `reducer = GradientReducer(model)`, `loss.backward()` leaves in every
    `parameter.grad` the average over all ranks of the gradients accumulated since the last reduction, whatever was
    in `.grad` before included. `zero_grad` works both ways. At construction rank 0's parameters and buffers are
    copied to all ranks; buffers are not synchronised afterwards.

    Args:
        module: any module with dense parameters of any floating or complex dtypes and devices; parameters that
            require no gradient at construction are left alone. Shared parameters are reduced once.
        process_group: a torch.distributed group, by default the whole world.
        bucket_mb: largest bucket in MiB; one larger parameter is a bucket of its own.
        first_bucket_mb: the same for each dtype's and device's first bucket: small, so that communication starts early.
        algorithm: the ringlet algorithm of the all-reduces ("ring", "butterfly", ...), by default the group's own.
        find_unused_parameters: parameters may get no gradient in a backward. On a rank where one gets none, what is
            in `.grad` (or zero) is averaged with the others; where no rank has one, `.grad` stays untouched. Costs one
            small all-reduce per backward, and no bucket with an unused parameter overlaps with backward.

    Raises:
        InvalidUsage: at construction, when ranks differ in a parameter, buffer or setting (naming rank and parameter),
            when no parameter requires a gradient, when a parameter is to have sparse gradients, or when `algorithm`
            is given on another backend. From `backward`, when parameters got no gradient and
            `find_unused_parameters` is off (naming them; the other ranks' reduction still completes, with nothing
            from this rank), or when a gradient arrives again after its bucket was sent.
        PeerLost, Timeout, SystemError: from `backward`, as the group's backend raises them.

    A rank whose backward reaches no parameter at all takes no part in that reduction and the others wait for it.
    Not thread-safe: one backward at a time. Higher derivatives do not flow through the averaged gradients.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float = 25,
        first_bucket_mb: float = 1,
        algorithm: str | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self._group = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
        self._algorithm = algorithm
        self._find_unused = find_unused_parameters
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        settings = f"bucket_mb={bucket_mb} first_bucket_mb={first_bucket_mb} algorithm={algorithm} "
        settings += f"find_unused_parameters={find_unused_parameters}"
        replicas.check_agreement([f"settings {settings}", *replicas.describe(module)], self._group, self._device)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        _refuse_unsupported(module, named)
        self._check_algorithm()
        replicas.broadcast_state(module, self._group)

        self._flat = FlatGradients(named, buckets.Caps(int(bucket_mb * _MIB), int(first_bucket_mb * _MIB)), self._group)
        self._rebuild_due = not find_unused_parameters and len(self._flat.plan) > 1

        self._sync = True
        self._task: int | None = None  # autograd's id of the backward under way
        self._order: dict[int, None] = {}  # gradients that arrived in it, in order
        self._used = bytearray(len(named))  # gradients that arrived since the last reduction
        self._launched = 0
        self._times = _Times()
        self._rearm()
        # functions, not bound methods: copy.deepcopy(module) copies its forward hooks
        self._hooks = [module.register_forward_hook(lambda _module, _inputs, output: self._on_forward(output))]
        for index, (_, parameter) in enumerate(named):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank; the next one outside averages the sums. All ranks must agree."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def remove(self) -> None:
        """Takes the reducer off the module: later backwards are local. Gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def stats(self) -> dict[str, Any]:
        """What the reducer did, as plain numbers and names.

        Times are in seconds, of the latest reduced backward and summed over all (`total_`): `communication_s`, with at
        least one bucket under way; `exposed_s`, from the end of this rank's own backward until its gradients were
        ready (waiting for slower ranks included); `overlapped_s`, the difference.
        """
        times, flat = self._times, self._flat
        overlapped = max(0, times.communication - times.exposed)
        return {
            "algorithm": self._algorithm,
            "bucket_bytes": [bucket.nbytes for bucket in flat.plan],
            "bucket_parameters": [flat.names([slot.index for slot in bucket.slots]) for bucket in flat.plan],
            "rebuilt": not self._find_unused and not self._rebuild_due,
            "ready_order": flat.names(times.ready_order),
            "backwards": times.backwards,
            "launches": times.launches,
            "communication_s": times.communication * 1e-9,
            "overlapped_s": overlapped * 1e-9,
            "exposed_s": times.exposed * 1e-9,
            "total_communication_s": times.total_communication * 1e-9,
            "total_exposed_s": times.total_exposed * 1e-9,
        }

    # -- one backward: output's gradient, parameters' gradients, end --

    def _on_forward(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._task is not None and torch._C._current_graph_task_id() == -1:
            self._abandon()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, _gradient: torch.Tensor | None = None) -> None:
        # Opened by the output's gradient and not only by the first parameter's: with reentrant checkpoints the latter
        # arrives in a nested backward, whose end is not the end.
        if self._sync and self._task is None:
            self._task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        gradient = self._flat.gradients[index]
        arrived = parameter.grad
        if arrived is not gradient.view:
            if arrived is None or arrived.layout is not torch.strided:
                layout = None if arrived is None else arrived.layout
                raise InvalidUsage(f"the gradient of {gradient.name} has layout {layout}; only dense ones are reduced")
            if gradient.bucket.work is None:
                gradient.view.copy_(arrived.detach())
                parameter.grad = gradient.view
        self._used[index] = 1
        if not self._sync:
            return
        self._on_backward()
        bucket = gradient.bucket
        if bucket.work is not None:
            raise InvalidUsage(
                f"the gradient of {gradient.name} arrived again after its bucket was sent: a backward may "
                "reach it only once (reentrant checkpoints that share parameters reach them more often)"
            )
        if index in self._order:
            return
        self._order[index] = None
        bucket.waiting -= 1
        if bucket.waiting == 0:
            self._launch_full()

    def _launch_full(self) -> None:
        while self._launched < len(self._flat.buckets) and self._flat.buckets[self._launched].waiting <= 0:
            bucket = self._flat.buckets[self._launched]
            bucket.launched_ns = _now_ns()
            bucket.work = self._all_reduce(bucket.buffer, dist.ReduceOp.AVG)
            bucket.work.get_future().add_done_callback(partial(bucket.mark_done, bucket.launched_ns))
            self._launched += 1

    def _all_reduce(self, buffer: torch.Tensor, op: Any) -> Any:
        if self._algorithm is None:
            return dist.all_reduce(buffer, op, self._group, async_op=True)
        backend: Any = self._group._get_backend(buffer.device)
        before, backend.algorithm = backend.algorithm, self._algorithm
        try:
            return dist.all_reduce(buffer, op, self._group, async_op=True)
        finally:
            backend.algorithm = before

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        try:
            if self._order:  # none arrived: torch.autograd.grad, which leaves .grad alone
                self._finish()
        finally:
            self._rearm()

    def _finish(self) -> None:
        ended_ns = _now_ns()
        missing, kept = self._fill_missing()
        for bucket in self._flat.buckets:
            bucket.waiting = 0
        self._launch_full()
        used = self._reduce_used()
        for bucket in self._flat.buckets:
            bucket.work.wait()
        for index, gradient in enumerate(self._flat.gradients):
            if used[index]:
                gradient.parameter.grad = gradient.view
            elif index in kept:
                gradient.view.copy_(kept[index])
        self._record(ended_ns)
        if self._rebuild_due:
            self._rebuild()
        self._used = bytearray(len(self._flat.gradients))
        if missing and not self._find_unused:
            raise InvalidUsage(self._missing_message(missing))

    def _fill_missing(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Gives gradients that did not arrive their value in the buffers: what is in `.grad`, or zero.

        Returns the indices that got no gradient since the last reduction, and copies of those that were in place,
        to put back if no rank has one.
        """
        missing, kept = [], {}
        for index in sorted(set(range(len(self._flat.gradients))).difference(self._order)):
            gradient = self._flat.gradients[index]
            current = gradient.parameter.grad
            if current is None:
                gradient.view.zero_()
                self._used[index] = 0
            elif current is not gradient.view:
                gradient.view.copy_(current)
            elif not self._used[index]:
                kept[index] = current.clone()
            if not self._used[index]:
                missing.append(index)
        return missing, kept

    def _reduce_used(self) -> bytearray | list[int]:
        """Which parameters got a gradient on any rank, or on this one where none may be unused."""
        if not self._find_unused:
            return self._used
        used = torch.tensor(list(self._used), dtype=torch.uint8, device=self._device)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._group)
        return used.tolist()

    def _rebuild(self) -> None:
        """Once, after the first reduction: buckets in the order in which rank 0's gradients arrived."""
        self._rebuild_due = False
        default = [slot.index for bucket in self._flat.plan for slot in bucket.slots]
        order = torch.tensor([*self._order, *(i for i in default if i not in self._order)], device=self._device)
        dist.broadcast(order, group=self._group, group_src=0)
        self._flat.reorder(order.tolist())

    def _missing_message(self, missing: list[int]) -> str:
        names, of = self._flat.names(missing), len(self._flat.gradients)
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        return (
            f"rank {dist.get_rank(self._group)}: {len(names)} of {of} parameters got no gradient in this backward: "
            f"{shown}. The averages count nothing from this rank for them. Use every parameter in the loss, or freeze "
            "these before making the reducer, or pass find_unused_parameters=True"
        )

    def _abandon(self) -> None:
        """A backward raised before its end. Harmless unless buckets had gone out."""
        launched, of = self._launched, len(self._flat.buckets)
        self._rearm()
        if launched:
            raise InvalidUsage(
                f"rank {dist.get_rank(self._group)}: the previous backward stopped after {launched} of {of} buckets "
                "had been sent, so ranks no longer match: make a new process group and reducer, or restart"
            )

    def _rearm(self) -> None:
        self._task, self._order, self._launched = None, {}, 0
        for bucket in self._flat.buckets:
            bucket.rearm()

    def _record(self, ended_ns: int) -> None:
        now = _now_ns()
        busy = free_at = 0
        for bucket in self._flat.buckets:
            done = bucket.done_ns or now
            busy += max(0, done - max(bucket.launched_ns, free_at))
            free_at = max(free_at, done)
        times = self._times
        times.backwards += 1
        times.launches += self._launched
        times.communication, times.exposed = busy, now - ended_ns
        times.total_communication += busy
        times.total_exposed += now - ended_ns
        times.ready_order = list(self._order)

    def _check_algorithm(self) -> None:
        if self._algorithm is None:
            return
        backend: Any = self._group._get_backend(self._device)
        if not hasattr(backend, "algorithm"):
            raise InvalidUsage(
                f"algorithm={self._algorithm!r} needs a group on the ringlet backend, this one is on "
                f"{dist.get_backend(self._group)}: leave algorithm=None, or init_process_group('ringlet')"
            )
        before, backend.algorithm = backend.algorithm, self._algorithm  # raises for an unknown name
        backend.algorithm = before


def _refuse_unsupported(module: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise InvalidUsage(f"no parameter of {type(module).__name__} requires a gradient: there is nothing to reduce")
    for name, child in module.named_modules():
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse:
            raise InvalidUsage(f"{name or type(child).__name__} makes sparse gradients; make it with sparse=False")
