"""What the ranks of a group agree on: the same lines, the same refusal, numbers of all ranks, an order of rank 0's."""

from __future__ import annotations

import contextlib
import hashlib
import numbers
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ringlet.backend import backend_of
from ringlet.errors import InvalidUsage

ALIKE_SECONDS = 10.0  # a rank that refuses waits so long for the others to refuse the same
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def check_agreement(lines: list[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises InvalidUsage on every rank if `lines` differ, naming the first rank and line that differ from rank 0's.

    Collective. Costs one all-gather of 8 bytes on `device` while ranks agree.
    """
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
    digests = Numbers(digest, group, device).wait()
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * len(digests)
    dist.all_gather_object(everyone, lines, group=group)
    for rank, theirs in enumerate(everyone):
        for place in range(max(len(theirs), len(everyone[0]))):
            expected = everyone[0][place] if place < len(everyone[0]) else "nothing"
            found = theirs[place] if place < len(theirs) else "nothing"
            if expected != found:
                raise InvalidUsage(f"ranks hold different models: rank 0 has '{expected}', rank {rank} has '{found}'")


def comparable(value: Any, otherwise: Callable[[str], Any] = "a {}".format) -> Any:
    """What stands for the value in a line of `check_agreement`: equal on all ranks if the values are, and only then.
    `otherwise`: gives it from the type of a value whose repr may have an address, such as a function."""
    if isinstance(value, torch.Tensor):  # its repr has four digits
        return ["tensor", str(value.dtype), value.tolist()]
    if isinstance(value, (list, tuple)):
        return [comparable(each, otherwise) for each in value]
    if isinstance(value, dict):
        return {str(key): comparable(each, otherwise) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, numbers.Number):  # numpy's
        return [type(value).__qualname__, str(value)]
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else otherwise(type(value).__qualname__)


class Numbers:
    """One number of every rank, on its way to all of them. Collective."""

    def __init__(self, own: int, group: dist.ProcessGroup, device: torch.device) -> None:
        mine = torch.tensor([own], device=device)
        self._found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._found, mine, group=group, async_op=True)

    def wait(self) -> list[int]:
        self._work.wait()
        return [int(number) for number in self._found]


def largest_of_ranks(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Of each value the largest of all ranks'. Collective."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.tolist()


def one_rank(candidate: bool, group: dist.ProcessGroup, device: torch.device) -> int:
    """The highest rank for which `candidate` is true. Collective; it must be true on at least one rank."""
    return int(largest_of_ranks([dist.get_rank(group) if candidate else -1], group, device)[0])


def order_of_rank_0(
    seen: Sequence[int], otherwise: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """The numbers of `otherwise` in the order in which rank 0 has `seen` them, those that it has not seen last.
    Collective."""
    known = set(seen)
    order = torch.tensor([*seen, *(number for number in otherwise if number not in known)], device=device)
    dist.broadcast(order, group=group, group_src=0)
    return order.tolist()


def number_in(group: dist.ProcessGroup, kind: str) -> int:
    """How many of that kind the group has had before. Call it where all ranks of the group make one."""
    made = _made.setdefault(group, Counter())
    made[kind] += 1
    return made[kind] - 1


def refuse_together(message: str, group: dist.ProcessGroup, device: torch.device) -> NoReturn:
    """Raises InvalidUsage with `message`. Every rank should raise it at the same place of its program.

    If all ranks do so, the group is as before. If one rank has not done so after 10 s, this rank fails the group. On
    `ringlet` the other ranks then raise InvalidUsage with this message in the call in which they wait. On another
    backend they wait until this process ends, or for their timeout. The ranks compare through the group's store,
    because the group itself may be in other ranks' calls.
    """
    if not _all_refuse(message, group):
        backend = backend_of(group, device)
        if hasattr(backend, "fail"):
            backend.fail(f"rank {dist.get_rank(group)} refused what other ranks went on with: {message}")
    raise InvalidUsage(message)


def _all_refuse(message: str, group: dist.ProcessGroup) -> bool:
    alike = re.sub("0x[0-9a-f]+", "", message)  # in which each rank has addresses of its own
    topic = "ringlet refusal " + hashlib.sha256(alike.encode()).hexdigest()
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    with contextlib.suppress(RuntimeError):  # the store's timeout, and whatever else keeps ranks from agreeing
        store = group.get_group_store()
        time = store.add(f"{topic} {rank}", 1)  # the same message may be raised again
        store.set(f"{topic} {rank} {time}", "")
        store.wait([f"{topic} {other} {time}" for other in range(world)], timedelta(seconds=ALIKE_SECONDS))
        return True
    return False


@contextlib.contextmanager
def refusing_together(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """If a rank raises InvalidUsage inside, all ranks raise it."""
    try:
        yield
    except InvalidUsage as error:
        refuse_together(str(error), group, device)
