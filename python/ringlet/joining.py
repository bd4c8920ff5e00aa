"""How ranks join a group: what a call and the environment say of it, and the rendezvous."""

from __future__ import annotations

import operator
import os
import pathlib
import time
import warnings
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ringlet import _C, environment, log
from ringlet.claim import Claim, peek
from ringlet.errors import Error, InvalidUsage, Timeout
from ringlet.group_key import rendezvous_key
from ringlet.schedule.loading import load_given
from ringlet.store import asked
from ringlet.untraced import keep_untraced_if_loaded

DEFAULT_TIMEOUT: timedelta = timedelta(minutes=5)
TRANSPORTS = ("auto", "shared_memory", "tcp", "threads")
CONGESTION = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")


def default_transport() -> str:
    """RINGLET_TRANSPORT, or "auto". Raises InvalidUsage if it names none."""
    return checked_transport(os.environ.get("RINGLET_TRANSPORT") or "auto", "RINGLET_TRANSPORT")


def congestion_controls() -> tuple[str, str]:
    """This machine's, and that of ringlet's connections. Raises InvalidUsage for a wrong RINGLET_TCP_CONGESTION."""
    used = _C.congestion_control()
    return CONGESTION.read_text().strip() if CONGESTION.exists() else used, used


def checked_transport(transport: str, given: str) -> str:
    if transport not in TRANSPORTS:
        raise InvalidUsage(f'{given} must be one of {", ".join(TRANSPORTS)}, got "{transport}"')
    return transport


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """As given, or else as the launcher says."""
    if rank is None or world is None:
        place = environment.find(wanted="rank" if rank is None else "world")
        rank, world = (place.rank if rank is None else rank), (place.world if world is None else world)
    rank, world = whole(rank, "init: rank"), whole(world, "init: world")
    if not 0 <= rank < world:
        raise InvalidUsage(f"rank {rank} of world {world} does not exist")
    return rank, world


def as_timedelta(timeout: timedelta | float) -> timedelta:
    """Seconds or timedelta as timedelta, 100 years for infinity. Raises InvalidUsage if it is not a positive time."""
    return timedelta(milliseconds=_C.milliseconds(timeout))


def prepare(rank: int, world: int, transport: str | None = None) -> tuple[str, float, Error | None]:
    """Takes from the environment what it gives a group: the log, algorithms, and the transport if none is given. On
    rank 0, warns if the default table of rules cannot be used; groups then use the built-in rules.

    Returns the transport, the time, for `log.group_made`, and what is wrong with the environment: the rendezvous raises
    it on all ranks."""
    wrong: Error | None = None
    keep_untraced_if_loaded()
    try:
        log.configure(rank, world)
        load_given()
        transport = transport or default_transport()
    except Error as error:
        wrong = error
    if rank == 0 and (warning := _C.table_warning()):
        warnings.warn(warning, stacklevel=3)
    return transport or "auto", time.monotonic(), wrong


def key_of_default(store: Store, name: str, claim: Claim, timeout: timedelta, wrong: Error | None) -> str:
    """The key of the default group. If ranks are missing, looks for them under other names, or in a group of another
    world that is made already."""
    with asked():
        store.set(f"ringlet/name/{claim.rank}", name)
        store.set(f"ringlet/world/{claim.rank}", str(claim.world))
    try:
        return rendezvous_key(store, f"ringlet/{name}", claim, timeout, wrong)
    except Timeout as late:
        with asked():
            names = {rank: peek(store, f"ringlet/name/{rank}") for rank in range(claim.world)}
            world = peek(store, "ringlet/world/0")
            joined = peek(store, f"ringlet/{name}/hello/0") is None  # else `late` has told what differs
        others = "".join(
            f'; rank {rank} says name="{said}"' for rank, said in names.items() if said not in (None, name)
        )
        if not others and joined and world not in (None, str(claim.world)):
            raise Timeout(
                f"{late} (rank 0 says world {world}, rank {claim.rank} says world {claim.world}; all ranks must agree)"
            ) from None
        if not others:
            raise
        raise Timeout(f'{late} (name="{name}"{others}; all ranks must agree)') from None


def ctas(most: Any) -> int:
    most = whole(most, "max_ctas")
    _C.check_max_ctas(most)
    return most


def whole(value: Any, what: str) -> int:
    """As an int. Raises InvalidUsage, with `what` it is, if it is no whole number or too large."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidUsage(f"{what} is {value!r}; pass a whole number") from None
    if abs(number) >= 1 << 31:
        raise InvalidUsage(f"{what} is {number}, too large")
    return number


def join(store: Store, key: str, claim: Claim, timeout: timedelta, began: float) -> _C.Group:
    """The handle of the group of all ranks that have this key."""
    group = _C.Group.join(store, key, claim.rank, claim.world, timeout, claim.transport)
    return log.group_made(group, began)
