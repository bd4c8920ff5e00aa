"""Where the ranks of a group meet: a key of their store that nobody has used before, agreed by all of them.

A store can outlive processes. torch elastic's agent keeps one for all restarts of a worker group, and what ranks that
were killed have left there (how often they met, their addresses) must not be taken for news, nor must it matter how far
each of them came. So ranks agree on what is new:

    rank r:   hello/r := a number drawn just now, waits for the answer to that number, says that it has it
    rank 0:   draws a key, answers every number that it finds with it, until all ranks have said that they have it;
              says so to all

An old number gets an answer that nobody reads. The processes of before must be gone, which elastic sees to.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ringlet.errors import InvalidUsage, Timeout
from ringlet.interruptible import wait_for_key

if TYPE_CHECKING:
    from torch.distributed import Store

_LEAST_PAUSE_S, _LARGEST_PAUSE_S = 2e-4, 5e-3


def meeting_key(store: Store, name: str, rank: int, world: int, timeout: timedelta) -> str:
    """Where this rank's next meeting of that name takes place. Raises InvalidUsage for a rank that cannot be, and
    Timeout naming the ranks that did not come."""
    if not 0 <= rank < world:
        raise InvalidUsage(f"rank {rank} of world {world} does not exist")
    if rank == 0:
        return _lead(store, name, world, timeout)
    until = time.monotonic() + timeout.total_seconds()
    number = secrets.token_hex(16)
    store.set(f"{name}/hello/{rank}", number)
    if not wait_for_key(store, f"{name}/answer/{number}", until):
        raise Timeout(_missed(rank, world, "0"))
    key = store.get(f"{name}/answer/{number}").decode()
    store.set(f"{key}/has/{rank}", "")
    if not wait_for_key(store, f"{key}/all", until):
        raise Timeout(_missed(rank, world, store.get(f"{key}/absent").decode()))
    return key


def _lead(store: Store, name: str, world: int, timeout: timedelta) -> str:
    key = f"{name}/{secrets.token_hex(16)}"
    until, pause = time.monotonic() + timeout.total_seconds(), _LEAST_PAUSE_S
    absent, answered = list(range(1, world)), dict.fromkeys(range(1, world), "")
    told = ""
    while absent:
        names = ", ".join(map(str, absent))
        if names != told:
            # For the others, should time be up. And a FileStore has no file, for which a look would wait, before this.
            store.set(f"{key}/absent", told := names)
        for rank in list(absent):
            _answer(store, name, rank, key, answered)
            if answered[rank] and store.check([f"{key}/has/{rank}"]):
                absent.remove(rank)
                for used in (f"{name}/hello/{rank}", f"{name}/answer/{answered[rank]}", f"{key}/has/{rank}"):
                    store.delete_key(used)
        if absent and time.monotonic() > until:
            raise Timeout(_missed(0, world, told))
        time.sleep(pause if absent else 0)
        pause = min(2 * pause, _LARGEST_PAUSE_S)
    store.set(f"{key}/all", "")
    return key


def _answer(store: Store, name: str, rank: int, key: str, answered: dict[int, str]) -> None:
    if store.check([f"{name}/hello/{rank}"]):
        number = store.get(f"{name}/hello/{rank}").decode()
        if number != answered[rank]:
            store.set(f"{name}/answer/{number}", key)
            answered[rank] = number


def _missed(rank: int, world: int, absent: str) -> str:
    return f"rank {rank} of {world} did not meet rank(s) {absent} in time: have they failed or not started?"
