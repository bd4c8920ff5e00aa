"""The torch store that ranks share: how a rank reaches it, and its failures as ringlet's errors."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ringlet import environment, interruptible
from ringlet.errors import Error, InvalidUsage, PeerLost, SystemError, Timeout

if TYPE_CHECKING:
    from torch.distributed import Store

_ATTEMPT_S, _PAUSE_S = 3.0, 0.1


def from_environment(rank: int, world: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, or on the host that the launcher names. Rank 0 serves it, unless
    torchrun does. Raises InvalidUsage, SystemError if rank 0 cannot serve it, Timeout if a rank cannot reach it."""
    if world == 1:
        return dist.HashStore()
    address, port = environment.master()
    # Under torchrun the agent already serves the store at that address, and keeps it over restarts (rendezvous.py).
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    _reach(address, port, f"rank {rank} of {world}", timeout, serve)
    try:
        # rendezvous.py names the missing ranks; TCPStore would only count them.
        store = interruptible.call(lambda: dist.TCPStore(address, port, world, serve, timeout, wait_for_workers=False))
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        if not serve:
            raise PeerLost(f"rank {rank} of {world} lost the store at {address}:{port}: {reason}") from error
        raise SystemError(
            f"rank 0 cannot serve the store of all ranks at {address}:{port}: {reason}; if another job or a "
            "second rank 0 uses MASTER_PORT, set another port"
        ) from error
    job = _job_of(world)
    return dist.PrefixStore(f"ringlet/{job}" if job else "ringlet", store)


def _job_of(world: int) -> str | None:
    """The job of which this is a rank, if the launcher names it. Another job may have the same port, and reach this
    job's store: then its ranks do not count as this job's. The program may have numbered the job's ranks anew."""
    try:
        place = environment.find()
    except InvalidUsage:
        return None
    return place.job if place.world == world else None


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """What a store raises inside becomes PeerLost: the process that serves it is gone."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        raise PeerLost(
            f"the store that the ranks share does not answer ({reason}): the process that serves it, rank 0 "
            "or torchrun, may have ended"
        ) from error


def _reach(address: str, port: int, who: str, timeout: timedelta, serve: bool) -> None:
    """Returns once the name is known and, unless this process is to serve there, somebody listens. That a name is
    unknown can change while a job starts."""
    until = time.monotonic() + timeout.total_seconds()
    while True:
        left = until - time.monotonic()
        try:
            if serve:
                socket.getaddrinfo(address, port)
            else:
                socket.create_connection((address, port), timeout=max(0.01, min(_ATTEMPT_S, left))).close()
            return
        except (OSError, UnicodeError) as error:
            failure = error
        if left <= 0:
            break
        time.sleep(min(_PAUSE_S, left))
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, (socket.gaierror, UnicodeError)):
        raise InvalidUsage(f'MASTER_ADDR="{address}" cannot be resolved ({reason}): set it to the host of rank 0')
    raise Timeout(
        f"{who} did not reach the store of rank 0 at {address}:{port} (MASTER_ADDR:MASTER_PORT) in "
        f"{timeout.total_seconds():g} s ({reason}): rank 0 or torchrun may have failed, or not have started"
    )
