"""How long this process stood still because the machine had other things to do: what a test that measures time allows
for, in place of a constant that is too large on an idle machine and too small on a busy one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

NAP_S = 0.005
# A nap that is over this late says nothing of the machine.
USUAL_S = 0.005


class Stalls:
    """What a thread that only naps was late by."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # when a nap ended, and by how much too late
        self._watching = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def since(self, moment: float) -> float:
        """Seconds, since that time of time.monotonic(), all in all."""
        return sum(late for ended, late in self._late if ended > moment)

    def _nap(self) -> None:
        while not self._watching.is_set():
            began = time.monotonic()
            time.sleep(NAP_S)
            ended = time.monotonic()
            if ended - began - NAP_S > USUAL_S:
                self._late.append((ended, ended - began - NAP_S))

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._watching.set()
        self._thread.join()


def later(seconds: float, act: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Calls act from a thread of its own when this process could run for so long: what waits by then on an idle
    machine does so on a busy one."""

    def run() -> None:
        for _ in range(round(seconds / NAP_S)):
            time.sleep(NAP_S)
        act(*arguments)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def watched() -> Iterator[Stalls]:
    """`with watched() as stalls: ...`, and then `now - moment - stalls.since(moment)` is not the machine's fault."""
    stalls = Stalls()
    stalls.start()
    try:
        yield stalls
    finally:
        stalls.end()
