"""Before the first call with a user's own algorithm, all ranks check that it is the same on every rank, and right.

The three steps are the same on every rank, so either all ranks go on or all raise:
1. Every rank makes the schedules of all ranks for this group's world, root and hosts. The ranks gather digests.
2. If a rank failed to, or digests differ, the ranks gather their texts, and all raise the same InvalidUsage.
3. Rank 0 proves the schedule (ringlet.schedule.prove), once in a process for each schedule, and sends the result to the
   other ranks. If the schedule is wrong, all ranks raise InvalidUsage with the prover's words. If it is right, each
   rank gives its rounds to the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ringlet import _C
from ringlet.errors import InvalidUsage
from ringlet.schedule import Algorithm, Schedule, ScheduleError
from ringlet.schedule.packed import DIGEST_BYTES, digest, packed
from ringlet.schedule.prove import prove
from ringlet.schedule.registry import at_slot

PROOF_SECONDS = 3600.0  # how long the others wait for rank 0's proof: for a large world it takes minutes

_proved: set[bytes] = set()  # digests


@dataclass(frozen=True)
class _Made:
    """A rank's result of the function: a schedule, or the reason why there is none."""

    schedule: Schedule | None
    ranks: tuple[bytes, ...]
    digest: bytes
    words: str


def agree(group: Any, slot: int, root: int) -> None:
    """Checks that the algorithm can run on the group for that root. Collective; raises InvalidUsage on all ranks."""
    algorithm = at_slot(slot)
    made = _made(algorithm, group, root)
    digests = _gathered(group, made.digest)
    if len(set(digests)) > 1 or made.schedule is None:
        raise InvalidUsage(_difference(algorithm, digests, all_gather_texts(group, made.words[:4096])))
    verdict = broadcast_text(group, _verdict(made) if group.rank == 0 else "")
    if verdict:
        raise InvalidUsage(f"{_title(algorithm)} is wrong: {verdict}")
    _C.hand_over(slot, root, list(group.schedule_hosts), made.schedule.parts, list(made.ranks))


def _made(algorithm: Algorithm, group: Any, root: int) -> _Made:
    try:
        schedule = algorithm.schedule(group.world, root, group.schedule_hosts)
        ranks = tuple(packed(rounds, rank) for rank, rounds in enumerate(schedule.ranks))
        key = digest(schedule, ranks)
    except ScheduleError as error:
        error.schedule = ""  # the caller names it
        return _Made(None, (), bytes(DIGEST_BYTES), f"{algorithm.origin}: {error}")
    except Exception as error:  # a user's function may raise anything, on this rank alone
        words = f"{type(error).__name__}: {error}"
        return _Made(None, (), bytes(DIGEST_BYTES), f"{algorithm.origin}: {words}")
    return _Made(schedule, ranks, key, f"that of {algorithm.origin}, digest {key.hex()[:12]}")


def _verdict(made: _Made) -> str:
    """The prover's words; empty if the schedule is right."""
    assert made.schedule is not None
    if made.digest in _proved:
        return ""
    try:
        prove(made.schedule)
    except ScheduleError as error:
        return str(error)
    except Exception as error:  # such as MemoryError: the others wait for the result
        return f"the proof failed: {type(error).__name__}: {error}"
    _proved.add(made.digest)
    return ""


def _difference(algorithm: Algorithm, digests: list[bytes], texts: list[str]) -> str:
    failed = [rank for rank, key in enumerate(digests) if not any(key)]
    if failed:
        return f"{_title(algorithm)}: rank {failed[0]} could not make a schedule for this group: {texts[failed[0]]}"
    other = next(rank for rank, key in enumerate(digests) if key != digests[0])
    return (
        f"{_title(algorithm)} differs between ranks: rank 0 has {texts[0]}; rank {other} has {texts[other]}: "
        "register the same function on all ranks, and let it depend on rank, world, root and hosts only"
    )


def _title(algorithm: Algorithm) -> str:
    return f'{algorithm.collective} algorithm "{algorithm.name}"'


def _gathered(group: Any, mine: bytes) -> list[bytes]:
    """The bytes of every rank. All ranks pass the same number of bytes."""
    if group.world == 1:
        return [mine]
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    taken = torch.empty(group.world * len(mine), dtype=torch.uint8)
    _C.all_gather(group, taken, sent, "sum", "circulant", 0, None, 1.0, False)
    data = bytes(taken.tolist())
    return [data[i : i + len(mine)] for i in range(0, len(data), len(mine))]


def all_gather_texts(group: Any, mine: str) -> list[str]:
    """Every rank's text. group: the core's. Collective."""
    data = mine.encode(errors="replace")
    lengths = [int.from_bytes(length, "little") for length in _gathered(group, len(data).to_bytes(4, "little"))]
    padded = _gathered(group, data.ljust(max(1, *lengths), b"\0"))
    return [text[:length].decode(errors="replace") for text, length in zip(padded, lengths, strict=True)]


def broadcast_text(group: Any, text: str) -> str:
    """Rank 0's text."""
    if group.world == 1:
        return text
    data = bytearray(text.encode(errors="replace"))
    length = torch.tensor([len(data)])
    _C.broadcast(group, length, length, "sum", "tree", 0, PROOF_SECONDS, 1.0, False)
    if not length.item():
        return ""
    words = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(length.item()), dtype=torch.uint8)
    _C.broadcast(group, words, words, "sum", "tree", 0, None, 1.0, False)
    return bytes(words.tolist()).decode(errors="replace")


_C.set_agreement(agree)
