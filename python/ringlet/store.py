"""The torch store that ranks share: how a rank reaches it, and its failures as ringlet's errors."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from ringlet import environment, interruptible
from ringlet.errors import Error, InvalidUsage, PeerLost, ResourceError, Timeout

_ATTEMPT_S, _PAUSE_S = 3.0, 0.1
_OWNER = "ringlet/job"  # the key of the job whose rank 0 serves the store
SECOND_RANK_0 = "second rank 0"  # the key of another process that would serve it, in a job that nothing names
_NOTE_S = 2.0  # at most, for such a process to leave its note

# By process, because a forked child must not use, or end, what it has of its parent: the address of the last store, the
# store, and whether this process serves it. It outlives groups: others may still read there how they joined the last
# one, or join the next one already.
_kept: dict[int, tuple[tuple[str, int], Store, bool]] = {}


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def serves() -> bool:
    """Whether this process serves the last store of `from_environment`."""
    return os.getpid() in _kept and _kept[os.getpid()][2]


def from_environment(rank: int, world: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, or on the host that the launcher names. Rank 0 serves it, unless
    torchrun does, or this process does already (for torch.distributed). Raises InvalidUsage if it is another job's,
    ResourceError if rank 0 cannot serve it, Timeout if a rank cannot reach it."""
    if world == 1:
        return dist.HashStore()
    where = environment.master()
    if not _still_answers(where, timeout):
        _kept[os.getpid()] = where, *_made(where, rank, world, timeout)
    store = _kept[os.getpid()][1]
    # Another job may have the same port, and reach this job's store: its ranks do not count as this job's.
    job = environment.job_of(world)
    if job is not None:
        _check_owner(store, job, "{}:{}".format(*where))
    return dist.PrefixStore(f"ringlet/{job}" if job else "ringlet", store)


def _still_answers(where: tuple[str, int], timeout: timedelta) -> bool:
    """Whether this process has a store of that address, whoever serves it."""
    there, store, _ = _kept.get(os.getpid(), (None, None, False))
    if there != where or store is None:
        return False
    try:
        store.check([_OWNER])
    except RuntimeError:  # its process has ended
        return False
    store.set_timeout(timeout)
    return True


def _made(where: tuple[str, int], rank: int, world: int, timeout: timedelta) -> tuple[Store, bool]:
    """The store, and whether this process serves it."""
    address, port = where
    serve = _reach(address, port, rank, world, timeout)
    try:
        # group_key.py names the missing ranks; TCPStore would only count them.
        store = interruptible.call(
            lambda: dist.TCPStore(address, port, world, serve, timeout, wait_for_workers=False, multi_tenant=True)
        )
    except Error:
        raise
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        if not serve:
            raise PeerLost(f"rank {rank} of {world} lost the store at {address}:{port}: {reason}") from error
        _leave_note(address, port, world)
        raise ResourceError(
            f"rank 0 cannot serve the store of all ranks at {address}:{port}: {reason}; if another job or a "
            "second rank 0 uses MASTER_PORT, set another port"
        ) from error
    if serve:
        store.set(_OWNER, environment.job_of(world) or "")
    return store, serve


def _leave_note(address: str, port: int, world: int) -> None:
    """Tells the rank 0 that serves the store, if it is ringlet's, that this process is another one. If neither job has
    a name, ranks of both can come there."""

    def leave() -> None:
        with contextlib.suppress(RuntimeError):
            theirs = dist.TCPStore(address, port, world, False, timedelta(seconds=_NOTE_S), wait_for_workers=False)
            if theirs.check([_OWNER]) and theirs.get(_OWNER) == b"":
                dist.PrefixStore("ringlet", theirs).set(SECOND_RANK_0, this_process())

    if environment.job_of(world) is None:
        # Whatever listens there may not answer.
        thread = threading.Thread(target=leave, name="ringlet-note", daemon=True)
        interruptible.start(thread, "a wait in torch")
        thread.join(_NOTE_S)


def _check_owner(store: Store, job: str, where: str) -> None:
    """Raises InvalidUsage if another job's rank 0 serves the store. Of a store that torchrun serves nobody is owner."""
    with asked():
        owner = store.get(_OWNER).decode() if store.check([_OWNER]) else ""
    if owner not in ("", job):
        raise InvalidUsage(
            f"the store at {where} (MASTER_ADDR:MASTER_PORT) belongs to job {owner!r}, this rank to job {job!r}: set "
            "another MASTER_PORT for one of them"
        )


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """What a store raises inside becomes PeerLost: the process that serves it is gone. Or ResourceError: each look into
    a FileStore opens a file."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        for lack in (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE)):
            if lack.lower() in reason.lower():
                raise ResourceError(
                    f"the store that the ranks share: {lack}; raise ulimit -n, or close files"
                ) from error
        raise PeerLost(
            f"the store that the ranks share does not answer ({reason}): the process that serves it, rank 0 "
            "or torchrun, may have ended"
        ) from error


def _reach(address: str, port: int, rank: int, world: int, timeout: timedelta) -> bool:
    """Returns once the name is known and somebody listens, or this process is to: then True. That a name is unknown can
    change while a job starts.

    Under torchrun the agent serves the store, from before it starts the ranks, and keeps it over restarts
    (group_key.py). If nobody listens, the program has set another address than the agent's."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    until = time.monotonic() + timeout.total_seconds()
    while True:
        left = until - time.monotonic()
        try:
            if rank == 0 and not by_agent:
                check_route(address, port)
                return True
            socket.create_connection((address, port), timeout=max(0.01, min(_ATTEMPT_S, left))).close()
            return False
        except ConnectionRefusedError as error:
            if rank == 0:
                return True
            failure: Exception = error
        except (OSError, UnicodeError) as error:
            failure = error
        if left <= 0:
            break
        time.sleep(min(_PAUSE_S, left))
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, (socket.gaierror, UnicodeError)):
        raise InvalidUsage(f'MASTER_ADDR="{address}" cannot be resolved ({reason}): set it to the host of rank 0')
    raise Timeout(
        f"rank {rank} of {world} did not reach the store of rank 0 at {address}:{port} (MASTER_ADDR:MASTER_PORT) in "
        f"{timeout.total_seconds():g} s ({reason}): rank 0 or torchrun may have failed, or not have started"
    )


def check_route(address: str, port: int) -> None:
    """Raises OSError if packets to that address have no way from here, as with the loopback interface down: TCPStore,
    which connects to the server that it makes, would print warnings until the timeout."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # of a datagram socket: sends nothing
