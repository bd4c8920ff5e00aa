"""Calls objects before or after every step of every optimizer of this process, as long as they live.

torch keeps such hooks in dicts, and each step iterates over them. A garbage collection may come in between, so a
finalizer must not remove a hook: that step would raise ("OrderedDict mutated during iteration"). So torch has one hook
of each kind for good, which calls the objects that are alive.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class BeforeSteps(Protocol):
    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Returns other arguments for the step, or None."""


class AfterSteps(Protocol):
    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...


_before: weakref.WeakSet[BeforeSteps] = weakref.WeakSet()
_after: weakref.WeakSet[AfterSteps] = weakref.WeakSet()


def call_before_steps(watcher: BeforeSteps) -> None:
    _set_hooks()
    _before.add(watcher)


def call_after_steps(watcher: AfterSteps) -> None:
    _set_hooks()
    _after.add(watcher)


def call_no_more(watcher: Any) -> None:
    _before.discard(watcher)
    _after.discard(watcher)


@functools.cache
def _set_hooks() -> None:
    register_optimizer_step_pre_hook(_call_before)
    register_optimizer_step_post_hook(_call_after)


def _call_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    changed = None
    for watcher in list(_before):
        given = watcher.before_step(optimizer, args, kwargs)
        if given is not None:
            args, kwargs = changed = given
    return changed


def _call_after(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    for watcher in list(_after):
        watcher.after_step(optimizer)
