"""Schedules as bytes: Python gives them to the core, and ranks compare them to check that they have the same schedule.

A rank's rounds are 32-bit integers: the number of rounds, each round's number of steps, and for each step its verb
(index into VERBS), peer, first and count. csrc/bindings/authored.cc reads and writes the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from ringlet.schedule.data import VERBS, Round, Schedule, ScheduleError, Step

DIGEST_BYTES = hashlib.sha256().digest_size

_NUMBERS = {verb: number for number, verb in enumerate(VERBS)}


def packed(rounds: Sequence[Round], rank: int = 0) -> bytes:
    """One rank's rounds. Raises a ScheduleError of that rank for an unknown verb or a number beyond 32 bits."""
    words = [len(rounds), *(len(round.steps) for round in rounds)]
    for index, round in enumerate(rounds):
        for step in round.steps:
            if step.verb not in _NUMBERS:
                text = f"the verb must be one of {', '.join(VERBS)}, got {step.verb!r}"
                raise ScheduleError(rank, index, step.first, text)
            if max(map(abs, (step.peer, step.first, step.count))) >= 1 << 31:
                raise ScheduleError(rank, index, None, f"{step}: numbers have at most 31 bits")
            words += (_NUMBERS[step.verb], step.peer, step.first, step.count)
    return array("i", words).tobytes()


def unpacked(data: bytes) -> tuple[Round, ...]:
    """The rounds of packed()."""
    words = array("i")
    words.frombytes(data)
    rounds, at = [], 1 + words[0]
    for count in words[1:at]:
        ends = range(at, at + 4 * count, 4)
        rounds.append(Round(tuple(Step(VERBS[words[i]], words[i + 1], words[i + 2], words[i + 3]) for i in ends)))
        at += 4 * count
    return tuple(rounds)


def digest(schedule: Schedule, ranks: Sequence[bytes]) -> bytes:
    """32 bytes (SHA-256), equal if collective, world, root, parts, hosts and all steps are. ranks: from packed()."""
    place = (schedule.collective, schedule.world, schedule.root, schedule.parts, schedule.hosts)
    hashed = hashlib.sha256(repr(place).encode())
    for rank in ranks:
        hashed.update(len(rank).to_bytes(8, "little"))
        hashed.update(rank)
    return hashed.digest()
