"""A Zero's report: the memory that it holds, and the times of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .gradients import Gradients
from .memory import MappedFiles, storage_bytes
from .optimizer import ShardedOptimizer
from .shards import FlatUnit
from .traffic import Traffic

PHASES = ("forward", "backward", "step")


def memory(
    flats: list[FlatUnit], gradients: Gradients, sharded: ShardedOptimizer, files: Iterable[MappedFiles | None]
) -> dict[str, int]:
    """Bytes of the storages of model states, by kind. Storages in files count under "file" only."""
    kept = [file for file in files if file is not None]
    kinds = {
        "parameters": [flat.whole if flat.whole is not None else flat.shard for flat in flats],
        "gradients": [tensor for unit in gradients.units for tensor in unit.tensors()],
        "master": [piece.tensor for piece in sharded.pieces if piece.is_master],
        "optimizer": [state for piece in sharded.pieces for state in sharded.states(piece)],
    }
    held, in_files = {}, []
    for kind, tensors in kinds.items():
        outside = [tensor for tensor in tensors if not any(file.hold(tensor) for file in kept)]
        in_files += [tensor for tensor in tensors if any(file.hold(tensor) for file in kept)]
        held[kind] = storage_bytes(outside)
    return {**held, "total": sum(held.values()), "file": storage_bytes(in_files)}


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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

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
