"""Whether this machine has nothing else to do just now: only then does a test's time tell of the test."""

from __future__ import annotations

import hashlib
import os
import threading
import time

SPIN_S = 0.3
# Of the time for which a thread wants a processor it gets at least so much where nobody else wants one.
LEAST_SHARE = 0.9


def is_idle() -> bool:
    """Whether all processors can be had at once, tried for SPIN_S."""
    shares: list[float] = []
    threads = [threading.Thread(target=_spin, args=(shares,)) for _ in os.sched_getaffinity(0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return min(shares) >= LEAST_SHARE


def _spin(shares: list[float]) -> None:
    data = bytes(1 << 22)  # hashed without Python's lock
    began, used = time.monotonic(), time.thread_time()
    while time.monotonic() - began < SPIN_S:
        hashlib.sha256(data).digest()
    shares.append((time.thread_time() - used) / (time.monotonic() - began))
