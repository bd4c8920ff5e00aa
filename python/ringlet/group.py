"""Groups of ranks, and the default group of this process (or thread)."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import Store

from ringlet import _C, environment, leaving, log
from ringlet.claim import Claim
from ringlet.errors import Error, InvalidUsage, Timeout
from ringlet.group_key import rendezvous_key
from ringlet.intruders import Intruders
from ringlet.joining import (
    DEFAULT_TIMEOUT,
    as_timedelta,
    checked_transport,
    ctas,
    join,
    key_of_default,
    prepare,
    rank_and_world,
    whole,
)
from ringlet.store import from_environment, serves

AnyGroup: TypeAlias = "Group | dist.ProcessGroup"


class Group:
    """Ranks that communicate. `init` and `new_group` make groups; calls take a group as `group=`.

    rank, world: this rank, and the number of ranks.
    ranks: the members' ranks in the default group.
    transport: "shared_memory", "tcp", "shared_memory+tcp" (inside hosts and between them) or "threads".
    hosts: the number of each rank's host, by first appearance.
    """

    def __init__(
        self,
        handle: _C.Group,
        name: str,
        store: Store | None,
        ranks: Sequence[int],
        carrier: str = "threads",
    ):
        self.handle = handle
        self.name = name
        self.store = store
        self.ranks = tuple(ranks)
        self.carrier = carrier  # as init was given it: of groups made of this one too
        self.rank: int = handle.rank
        self.world: int = handle.world
        self.transport: str = handle.transport
        self.hosts: tuple[int, ...] = tuple(handle.hosts)
        self._children = itertools.count()
        self._closed = False
        self._process_group: dist.ProcessGroup | None = None
        self._made: dist.ProcessGroup | None = None  # by process_group(): to be destroyed with this group
        self._when_ended: Callable[[], None] | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """The ranks of a group of torch.distributed, whatever its backend, as a Group. All its ranks make the first
        call for it, which joins them; later calls return the same Group. `finalize` closes it.

        Raises InvalidUsage for what is no group of which this rank is a member; Timeout, which names missing ranks.
        """
        if not isinstance(process_group, dist.ProcessGroup):
            raise InvalidUsage(f"Group.of: pass a group of torch.distributed, not {process_group!r}")
        made = _of_torch.get(process_group)
        if made is None or made._closed:
            _close_of_torch(dist.distributed_c10d._world.pg_map)
            made = _of_torch[process_group] = _joined_from(process_group)
        return made

    def process_group(self) -> dist.ProcessGroup:
        """The same ranks as a group of torch.distributed, for DDP, FSDP, DTensor and whatever else takes one. For the
        default group, all ranks make the first call, which makes torch.distributed's default group with the backend
        "ringlet" unless there is one; later calls return the same, until it is destroyed. A group of `Group.of` has the
        one it was made of.

        Raises InvalidUsage if ranks are threads (torch.distributed has one world a process), and for a part of the
        default group: make that with torch.distributed.new_group, and take `Group.of` of it.
        """
        if self._process_group is None or self._process_group not in dist.distributed_c10d._world.pg_map:
            self._process_group = _made_for_torch(self)
        return self._process_group

    def close(self, patience: timedelta | float = timedelta(seconds=2)) -> None:
        """Leaves the group. Pending calls complete, or end after `patience` (seconds or timedelta). Later calls raise
        InvalidUsage.

        Raises InvalidUsage, and leaves the group open: for a wrong `patience`, in a callback of a call, and in a signal
        handler that interrupts a call.
        """
        if self._closed:
            return
        limit = _patience(patience)
        leaving.leave()
        try:
            self.handle.close(limit)
        except InvalidUsage:
            raise
        except BaseException:  # such as KeyboardInterrupt: the group ended nevertheless
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._closed = True
        try:
            if self._when_ended is not None:
                self._when_ended()
        finally:
            if self._made is not None and self._made is dist.group.WORLD:  # else the user has destroyed it
                dist.destroy_process_group()

    def abort(self, reason: str) -> None:
        """Ends this rank's pending and later calls with PeerLost; the other ranks see that it left."""
        leaving.leave()
        self.handle.abort(reason)

    def calls(self) -> list[dict[str, Any]]:
        """This rank's last 16 collective calls on tensors of the host, the oldest first. The text of a PeerLost or a
        Timeout ends with them.

        sequence: the call's number in the group.
        collective, dtype, op, count, root: of the call (None if the collective has none).
        named: the algorithm that the caller asked for.
        algorithm: the one that ran (None if the call ended before the choice).
        in_place: whether peers read the tensors where they lie.
        segments: into how many segments the call was cut.
        done: whether the call is complete.
        seconds: its time; None unless RINGLET_LOG is info or more.
        """
        return self.handle.calls()

    def algorithm_for(self, collective: str, nbytes: int, *, registered: bool = False) -> str:
        """The algorithm that "auto" chooses for a message of the host; the same on every rank.

        nbytes: size of the largest buffer that a rank passes. registered: whether the tensors of all ranks are.
        """
        return self.handle.algorithm_for(collective, nbytes, registered)

    def gpu_transport(self, device: torch.device | str) -> str:
        """The transport of calls on tensors of that GPU, in words: peers' memory, NCCL, or both.

        Collective, each rank for its own GPU, unless a call on that GPU came before. Raises DeviceError on all ranks if
        one rank lacks a library or memory that its peers reach, and names the rank.
        """
        return self.handle.gpu_transport(torch.device(device))

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank's collectives sent over TCP or rings; 0 if peers read the memory themselves."""
        return self.handle.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank's collectives have received from peers."""
        return self.handle.bytes_received

    @property
    def connections(self) -> int:
        """Open TCP connections of this rank. ringlet makes one when an algorithm first names a peer."""
        return self.handle.connections

    def __repr__(self) -> str:
        failure = self.handle.failure
        state = ", closed" if self._closed else f", failed ({failure})" if failure else ""
        return f"<ringlet.Group {self.name!r}: rank {self.rank} of {self.world}, {self.transport}{state}>"


class _Default(threading.local):
    """The default group: of the thread if ranks are threads, else of the process."""

    group: Group | None = None


_of_thread = _Default()
_of_process: Group | None = None
_of_torch: dict[dist.ProcessGroup, Group] = {}  # by Group.of


def current() -> Group:
    """The default group: that of `init`, or else of torch.distributed's default group, whose ranks then all make this
    call. Raises InvalidUsage if there is neither."""
    group = _of_thread.group or _of_process
    if group is None and dist.is_initialized():
        return Group.of(_world_of_torch())
    if group is None:
        raise InvalidUsage("no group yet: call ringlet.init() first (under torchrun, or with rank=, world= and store=)")
    return group


def process_group_of(group: Any, who: str) -> dist.ProcessGroup:
    """The group of torch.distributed that `group` means: itself, that of a Group, or for None the default of
    torch.distributed, or else of `init`. Raises InvalidUsage, in the name of `who`, if there is none."""
    if group is None and dist.is_initialized():
        return _world_of_torch()
    if group is None and has_default():
        group = current()
    if isinstance(group, Group):
        return group.process_group()
    if group is None:
        raise InvalidUsage(
            f"{who}: no process group yet: call torch.distributed.init_process_group() or ringlet.init()"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidUsage(f"{who}: this rank is not a member of group=: make a {who} on its members only")
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidUsage(
            f"{who}: group is a {type(group).__name__}, not a group of torch.distributed: pass what "
            "torch.distributed.new_group() returns, or a ringlet.Group"
        )
    return group


def group_from(group: Any, call: str) -> Group:
    """The Group that `group` means: itself, that of a group of torch.distributed, or for None the default. Raises
    InvalidUsage, in the name of `call`, if it means none."""
    if isinstance(group, Group):
        return group
    if group is None:
        return current()
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidUsage(f"{call}: this rank is not a member of the group: make the call on its members only")
    if isinstance(group, dist.ProcessGroup):
        return Group.of(group)
    raise InvalidUsage(f"{call}: group must be a ringlet.Group or a group of torch.distributed, not {group!r}")


def _world_of_torch() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def _joined_from(process_group: dist.ProcessGroup) -> Group:
    store = dist.distributed_c10d._get_process_group_store(process_group)
    rank, world = process_group.rank(), process_group.size()
    limit = process_group._get_backend(process_group._device_types[0]).options._timeout
    transport, began, wrong = prepare(rank, world)
    if transport == "threads":
        wrong = wrong or InvalidUsage(
            "Group.of: ranks of torch.distributed are processes: unset RINGLET_TRANSPORT=threads"
        )
    name = f"of {process_group.group_name}"
    claim = Claim(rank, world, transport)
    key = rendezvous_key(store, "ringlet/group", claim, limit, wrong)
    made = Group(
        join(store, key, claim, limit, began), name, store, dist.get_process_group_ranks(process_group), transport
    )
    made._process_group = process_group
    return made


def _close_of_torch(alive: Container[dist.ProcessGroup] = ()) -> None:
    """Closes what Group.of made of groups of torch.distributed, except of those that are still `alive`."""
    for process_group in [one for one in _of_torch if one not in alive]:
        _of_torch.pop(process_group).close()


def _made_for_torch(group: Group) -> dist.ProcessGroup:
    if group.store is None:
        raise InvalidUsage("process_group: ranks are threads, but torch.distributed has one world a process")
    if group is not _of_process:
        if group._process_group is not None:
            raise InvalidUsage(
                "process_group: its group of torch.distributed was destroyed: make one, and take Group.of"
            )
        raise InvalidUsage(
            "process_group: this is a part of the default group: make it with torch.distributed.new_group, and use "
            "ringlet.Group.of(...) of that for the calls here"
        )
    if not dist.is_initialized():
        options = _C.BackendOptions(transport=group.carrier, max_ctas=group.handle.max_ctas)
        store = dist.PrefixStore("ringlet/torch", group.store)
        place: dict[str, Any] = {"rank": group.rank, "world_size": group.world, "timeout": group.handle.timeout}
        dist.init_process_group("ringlet", store=store, pg_options=options, **place)
        group._made = _world_of_torch()
    if (dist.get_rank(), dist.get_world_size()) != (group.rank, group.world):
        raise InvalidUsage(
            f"process_group: this is rank {group.rank} of {group.world}, but rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in torch.distributed: make both of the same ranks"
        )
    return _world_of_torch()


def has_default() -> bool:
    """Whether `init` was called (by this thread, if ranks are threads)."""
    return _of_thread.group is not None or _of_process is not None


def init(
    rank: int | None = None,
    world: int | None = None,
    store: Store | None = None,
    *,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    transport: str | None = None,
    name: str = "default",
    max_ctas: int = 0,
) -> Group:
    """Joins the default group.

    rank, world: by default from torchrun, mpirun or srun (environment.py).
    store: a torch.distributed store that all ranks share; by default one at MASTER_ADDR and MASTER_PORT, or on the host
    that the launcher names. A world of one and threads need none.
    timeout: seconds or timedelta, for the rendezvous and for every call that sets no timeout of its own.
    transport: "auto" (shared memory inside hosts, TCP between them), "shared_memory" (ranks are processes of one host),
    "tcp" or "threads" (ranks are threads that use one `name`); by default RINGLET_TRANSPORT, or auto.
    max_ctas: how many of a GPU's processors (NCCL's CTAs) calls on its tensors take at most; 0: no limit. The same on
    all ranks.

    Raises InvalidUsage for a second init, a bad rank or a missing variable; Timeout, which names the missing ranks.
    """
    global _of_process
    if transport is not None:
        checked_transport(transport, "transport")
    if not isinstance(name, str):
        raise InvalidUsage(f"init: name is {name!r}; pass a string")
    if store is not None and not isinstance(store, dist.Store):
        raise InvalidUsage(f"init: store is a {type(store).__name__}; pass a torch.distributed store, such as TCPStore")
    max_ctas = ctas(max_ctas)
    launched = rank is None  # so that all threads of this process would be the same rank
    rank, world = rank_and_world(rank, world)
    limit = as_timedelta(timeout)
    of_threads = (transport or os.environ.get("RINGLET_TRANSPORT")) == "threads"
    if (_of_thread.group if of_threads else _of_process) is not None:
        raise InvalidUsage("ringlet.init() was called before: call ringlet.finalize() first")
    transport, began, wrong = prepare(rank, world, transport)
    if transport == "threads" and launched and world > 1:  # the others are processes, and hear of it, too
        wrong = wrong or InvalidUsage(
            f'transport "threads" joins threads of one process, which pass rank= and world=, but this process is rank '
            f"{rank} of {world} by its launcher: choose another transport (transport= or RINGLET_TRANSPORT)"
        )
    elif transport == "threads":
        if wrong is not None:  # and on all, which have one environment
            raise wrong
        handle = log.group_made(_C.Group.threads(name, rank, world, limit), began)
        handle.max_ctas = max_ctas
        _of_thread.group = Group(handle, name, None, range(world))
        _C.set_default(handle, True)
        return _of_thread.group
    job, nameless = environment.job_of(world), False
    if store is None:
        store = from_environment(rank, world, limit)
        nameless = job is None and rank == 0 and world > 1 and serves()
    claim = Claim(rank, world, transport, job, nameless)
    key = key_of_default(store, name, claim, limit, wrong)
    handle = join(store, key, claim, limit, began)
    handle.max_ctas = max_ctas
    group = Group(handle, name, store, range(world), transport)
    if nameless:
        try:
            group._when_ended = Intruders(store, f"ringlet/{name}", group.abort).end
        except BaseException:  # no thread, say: the other ranks hear that this one has left
            group.close(0)
            raise
    _of_process = group
    _C.set_default(handle, False)
    return group


def finalize() -> None:
    """Leaves the default group, if there is one. Called at exit too.

    Raises InvalidUsage where `Group.close` does. The default group then stays.
    """
    _close_of_torch()
    group = _of_thread.group or _of_process
    if group is None:
        return
    try:
        group.close()
    finally:
        if group._closed:
            _forget(group)


def _forget(group: Group) -> None:
    """`group` is the default group no more. Another thread may have made a new one meanwhile."""
    global _of_process
    if _of_thread.group is group:
        _C.set_default(None, True)
        _of_thread.group = None
    elif _of_process is group:
        _C.set_default(None, False)
        _of_process = None


def new_group(
    ranks: Sequence[int], *, timeout: timedelta | float | None = None, max_ctas: int | None = None
) -> Group | int:
    """Makes a group of some ranks of the default group, in the given order. Every rank of the default group must call
    it, with the same ranks and in the same order of calls. The ranks outside get
    `torch.distributed.GroupMember.NON_GROUP_MEMBER`, which no call takes as its group.

    ranks: distinct ranks of the default group. timeout: seconds or timedelta. max_ctas: as for `init`. By default both
    are those of the default group.

    Raises InvalidUsage for wrong ranks; Timeout, which names the missing ranks.
    """
    parent = current()
    try:
        members = [whole(rank, "new_group: a rank") for rank in ranks]
    except TypeError:
        raise InvalidUsage(f"new_group: ranks is {ranks!r}; pass a list of ranks") from None
    if len(set(members)) != len(members) or not all(0 <= r < parent.world for r in members) or not members:
        raise InvalidUsage(f"new_group: ranks must be distinct ranks from 0 to {parent.world - 1}, got {members}")
    most = parent.handle.max_ctas if max_ctas is None else ctas(max_ctas)
    number = next(parent._children)
    if parent.rank not in members:
        return dist.GroupMember.NON_GROUP_MEMBER
    limit = parent.handle.timeout if timeout is None else as_timedelta(timeout)
    name = f"{parent.name}/{number}"
    try:
        handle = _part_of(parent, members, name, limit)
    except Timeout as late:
        raise Timeout(
            f"{late}, or they called new_group with other ranks, or in another order (here its ranks are ranks "
            f"{', '.join(map(str, members))} of the default group)"
        ) from None
    handle.max_ctas = most
    return Group(handle, name, parent.store, members, parent.carrier)


def _part_of(parent: Group, members: list[int], name: str, limit: timedelta) -> _C.Group:
    """The handle of a group of some ranks of `parent`."""
    place, world = members.index(parent.rank), len(members)
    began, wrong = time.monotonic(), None
    try:
        log.configure(place, world)
    except Error as error:
        if parent.store is None:
            raise
        wrong = error
    if parent.store is None:  # ranks are threads
        title = f"{name}/{'.'.join(map(str, members))}"
        return log.group_made(_C.Group.threads(title, place, world, limit), began)
    claim = Claim(place, world, parent.carrier)
    key = rendezvous_key(parent.store, f"ringlet/{name}/{members}", claim, limit, wrong, once=True)
    return join(parent.store, key, claim, limit, began)


def _patience(patience: timedelta | float) -> timedelta:
    """As a timedelta. A close() without patience takes 0."""
    if patience in (0, timedelta(0)):
        return timedelta(0)
    try:
        return as_timedelta(patience)
    except InvalidUsage:
        raise InvalidUsage(f"close: patience must be seconds from 0 on or a timedelta, got {patience!r}") from None


atexit.register(_C.python_ends)  # the last: functions registered later run before it
atexit.register(finalize)
