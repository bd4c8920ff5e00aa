"""The collectives of a Zero, which are asynchronous: their bytes, the time of waits for them, and that of phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringlet.training.call_labels import set_call_label
from ringlet.training.replicas import bytes_of
from ringlet.training.reproducible import add_blocks

PHASES = ("forward", "backward", "step")
# torch 2.13 renamed them, and warns of the old names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class Pending:
    """A collective under way; the tensors it moves stay alive with it."""

    traffic: Traffic
    work: Any
    tensors: tuple[torch.Tensor, ...]
    finish: Callable[[], None] | None = None  # what `wait` does with what has come

    def wait(self) -> None:
        if self.work is not None:
            started_ns = time.perf_counter_ns()
            try:
                self.work.wait()
            except Exception:
                self.work = None
                raise  # after an interrupt, which is none, the work may still be under way
            self.work = None
            self.traffic.waited_ns += time.perf_counter_ns() - started_ns
            if self.finish is not None:
                self.finish()
            self.tensors = ()


class Traffic:
    """The traffic of one rank. `gathered_bytes` and `reduced_bytes` are those of an algorithm that sends the least,
    S (world - 1) / world for a whole buffer of S bytes. `waited_ns`: for how long this rank's thread was blocked."""

    def __init__(self, group: dist.ProcessGroup, overlap: bool) -> None:
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.gathered_bytes = 0
        self.reduced_bytes = 0
        self.collectives = 0
        self.waited_ns = 0
        self.overlap = overlap

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: int) -> Pending:
        """Every rank's `shard` into `whole`, in the order of ranks; `shard` may be this rank's place in it. `label`: of
        the unit; `ringlet` raises InvalidUsage on all ranks if they gather different units."""
        self.gathered_bytes += whole.nbytes * (self.world - 1) // self.world
        return self._start(label, _all_gather, (bytes_of(whole), bytes_of(shard)))

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, label: int) -> Pending:
        """The average over ranks of `whole`, this rank's part of it into `shard`. `label`: as for all_gather."""
        self.reduced_bytes += whole.nbytes * (self.world - 1) // self.world
        return self._start(label, _reduce_scatter, (shard, whole), op=dist.ReduceOp.AVG)

    def exchange_and_add(self, shard: torch.Tensor, whole: torch.Tensor, received: torch.Tensor, label: int) -> Pending:
        """The sum over ranks of `whole` along one binary tree, this rank's part of it into `shard`. `received`: scratch
        as large as `whole`. Each rank adds by itself, so the order does not depend on backend, hosts or algorithm."""
        self.reduced_bytes += whole.nbytes * (self.world - 1) // self.world

        def add() -> None:
            shard.copy_(add_blocks(received.view(self.world, -1)))

        return self._start(label, dist.all_to_all_single, (received, whole), add)

    def _start(
        self,
        label: int,
        call: Any,
        tensors: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
        **options: Any,
    ) -> Pending:
        self.collectives += 1
        set_call_label(label)
        try:
            work = call(*tensors, group=self.group, async_op=True, **options)
        finally:
            set_call_label(0)
        pending = Pending(self, work, tensors, finish)
        if not self.overlap:
            pending.wait()
        return pending


class Clock:
    """Times of the phases of a window, and of the window before."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._current_ns = dict.fromkeys(PHASES, 0)
        self._latest_ns = dict.fromkeys((*PHASES, "exposed"), 0)
        self._started_ns: dict[str, int] = {}
        self._waited_before_ns = 0

    def start(self, phase: str) -> None:
        self._started_ns[phase] = time.perf_counter_ns()

    def stop(self, phase: str) -> None:
        started_ns = self._started_ns.pop(phase, None)
        if started_ns is not None:
            self._current_ns[phase] += time.perf_counter_ns() - started_ns

    def end_window(self) -> None:
        waited_ns = self._traffic.waited_ns
        self._latest_ns = {**self._current_ns, "exposed": waited_ns - self._waited_before_ns}
        self._current_ns = dict.fromkeys(PHASES, 0)
        self._waited_before_ns = waited_ns

    def seconds(self) -> dict[str, float]:
        return {f"{phase}_s": ns * 1e-9 for phase, ns in self._latest_ns.items()}

    def line(self, steps: int, optimizer: torch.optim.Optimizer, times: bool) -> str:
        """One line for people: the step, its learning rates and, with `times`, the phases of the latest window."""
        rates: list[Any] = sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})
        text = f"step {steps}: lr {', '.join(f'{rate:.6g}' for rate in rates)}"
        if times:
            text += "".join(f", {phase} {1e-6 * ns:.2f} ms" for phase, ns in self._latest_ns.items())
        return text
