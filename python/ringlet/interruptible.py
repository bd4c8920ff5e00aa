"""Waits in torch in which Python handles no signals, made interruptible; and how this package starts threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Store

from ringlet.errors import ResourceError

T = TypeVar("T")
# A wait lasts at most a sixteenth longer than it must, and a large world does not keep the store busy.
_LEAST_PAUSE_S, _LARGEST_PAUSE_S, _PAUSES_OF_A_WAIT = 2e-4, 0.2, 16


def start(thread: threading.Thread, purpose: str) -> None:
    """Raises ResourceError if the system gives no thread."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(
            f"cannot start a thread for {purpose}: {error}; raise the limit on threads (ulimit -u, or the container's "
            "limit on pids) or on memory"
        ) from error


def call(function: Callable[[], T]) -> T:
    """`function()`, on a thread of its own. If the wait is interrupted, that thread is left behind."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    start(threading.Thread(target=run, name="ringlet-call", daemon=True), "a wait in torch")
    value, error = outcome.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def wait_for_key(store: Store, key: str, until: float) -> bool:
    """Whether the key is in the store by then (time.monotonic())."""
    began = time.monotonic()  # a store's own wait hears no signal, and a short one that ends in vain prints warnings
    while not store.check([key]):
        if (now := time.monotonic()) > until:
            return False
        pause = min(max((now - began) / _PAUSES_OF_A_WAIT, _LEAST_PAUSE_S), _LARGEST_PAUSE_S)
        time.sleep(min(pause, until - now))
    return True
