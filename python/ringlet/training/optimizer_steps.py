"""Calls objects before or after every step of every optimizer of this process, as long as they live.

torch keeps such hooks in dicts, and each step iterates over them. A garbage collection may come in between, so a
finalizer must not remove a hook: that step would raise ("OrderedDict mutated during iteration"). So torch has one hook
of each kind for good, which calls the objects that are alive.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class StepWatcher:
    """What is called, from `watch_steps` on."""

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Returns other arguments for the step, or None."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...


_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()


def watch_steps(watcher: StepWatcher) -> None:
    _set_hooks()
    _watchers.add(watcher)


def watch_no_more(watcher: StepWatcher) -> None:
    _watchers.discard(watcher)


@functools.cache
def _set_hooks() -> None:
    register_optimizer_step_pre_hook(_call_before)
    register_optimizer_step_post_hook(_call_after)


def _call_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    changed = None
    for watcher in list(_watchers):
        given = watcher.before_step(optimizer, args, kwargs)
        if given is not None:
            args, kwargs = changed = given
    return changed


def _call_after(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    for watcher in list(_watchers):
        watcher.after_step(optimizer)
