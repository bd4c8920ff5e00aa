"""Before the first call with an algorithm of one's own: all ranks see that it is the same, and right.

Three steps, each the same on every rank, so that all go on or all raise:
1. Every rank makes the schedules of all ranks for this group's world, root and hosts. Digests go round.
2. Where a rank failed to, or digests differ, what each rank has to say goes round; all raise the same InvalidUsage.
3. Rank 0 proves the schedule (ringlet.schedule.prove), once in a process for each schedule, and tells the others what
   came of it. A wrong one raises InvalidUsage with the prover's words; a right one is handed to the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ringlet import _C
from ringlet.errors import InvalidUsage
from ringlet.schedule import Algorithm, Schedule, ScheduleError
from ringlet.schedule.named import at_slot
from ringlet.schedule.packed import DIGEST_BYTES, digest, packed
from ringlet.schedule.prove import prove

PROOF_SECONDS = 3600.0  # what the others wait for rank 0's proof: of a large world it takes minutes

_proved: set[bytes] = set()  # digests


@dataclass(frozen=True)
class _Made:
    """What a rank made of the function: a schedule, or the reason why not."""

    schedule: Schedule | None
    ranks: tuple[bytes, ...]
    digest: bytes
    words: str


def register() -> None:
    """Has the core come here before first calls."""
    _C.set_agreement(agree)


def agree(group: Any, slot: int, root: int) -> None:
    """Sees to it that the algorithm can run on the group for that root. A collective; InvalidUsage on all ranks."""
    algorithm = at_slot(slot)
    made = _made(algorithm, group, root)
    digests = _gathered(group, made.digest)
    if len(set(digests)) > 1 or made.schedule is None:
        raise InvalidUsage(_difference(algorithm, digests, _texts(group, made.words)))
    verdict = _told(group, _verdict(made) if group.rank == 0 else "")
    if verdict:
        raise InvalidUsage(f"{_title(algorithm)} is wrong: {verdict}")
    _C.hand_over(slot, root, list(group.schedule_hosts), made.schedule.parts, list(made.ranks))


def _made(algorithm: Algorithm, group: Any, root: int) -> _Made:
    try:
        schedule = algorithm.schedule(group.world, root, group.schedule_hosts)
        ranks = tuple(packed(rounds, rank) for rank, rounds in enumerate(schedule.ranks))
        key = digest(schedule, ranks)
    except Exception as error:  # a user's function may raise anything, on this rank alone
        words = str(error) if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        return _Made(None, (), bytes(DIGEST_BYTES), f"{algorithm.origin}: {words}")
    return _Made(schedule, ranks, key, f"the one of {algorithm.origin}, digest {key.hex()[:12]}")


def _verdict(made: _Made) -> str:
    """The prover's words; empty: the schedule is right."""
    assert made.schedule is not None
    if made.digest in _proved:
        return ""
    try:
        prove(made.schedule)
    except ScheduleError as error:
        return str(error)
    _proved.add(made.digest)
    return ""


def _difference(algorithm: Algorithm, digests: list[bytes], texts: list[str]) -> str:
    failed = [rank for rank, key in enumerate(digests) if not any(key)]
    if failed:
        return f"{_title(algorithm)}: rank {failed[0]} has no schedule for this group: {texts[failed[0]]}"
    other = next(rank for rank, key in enumerate(digests) if key != digests[0])
    return (
        f"{_title(algorithm)} differs between ranks: rank 0 has {texts[0]}; rank {other} has {texts[other]}; "
        "all ranks must register the same function, which may depend on nothing but rank, world, root and hosts"
    )


def _title(algorithm: Algorithm) -> str:
    return f'{algorithm.collective} algorithm "{algorithm.name}"'


def _gathered(group: Any, mine: bytes) -> list[bytes]:
    """Every rank's bytes; all ranks give as many."""
    if group.world == 1:
        return [mine]
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    taken = torch.empty(group.world * len(mine), dtype=torch.uint8)
    _C.all_gather(group, taken, sent, "sum", "circulant", 0, None, 1.0, False)
    data = bytes(taken.tolist())
    return [data[i : i + len(mine)] for i in range(0, len(data), len(mine))]


def _texts(group: Any, mine: str) -> list[str]:
    """Every rank's text."""
    data = mine.encode()[:4096]
    lengths = [int.from_bytes(length, "little") for length in _gathered(group, len(data).to_bytes(4, "little"))]
    padded = _gathered(group, data.ljust(max(1, *lengths), b"\0"))
    return [text[:length].decode(errors="replace") for text, length in zip(padded, lengths, strict=True)]


def _told(group: Any, text: str) -> str:
    """Rank 0's text."""
    if group.world == 1:
        return text
    data = bytearray(text.encode())
    length = torch.tensor([len(data)])
    _C.broadcast(group, length, length, "sum", "tree", 0, PROOF_SECONDS, 1.0, False)
    if not length.item():
        return ""
    words = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(length.item()), dtype=torch.uint8)
    _C.broadcast(group, words, words, "sum", "tree", 0, None, 1.0, False)
    return bytes(words.tolist()).decode(errors="replace")
