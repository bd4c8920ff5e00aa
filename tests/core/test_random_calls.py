"""Programs drawn by lot (random_calls.py) on every transport and world. RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import os

import pytest

from random_calls import lose_a_rank, run_programs
from ranks import TRANSPORTS

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "1"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 60
# A rank that hears of it tells the others of its groups, those theirs, and each may take 2 s to leave what it is in.
KNOWN_WITHIN_SECONDS = 6.0


def test_programs(everyone):
    everyone(run_programs, range(FIRST, FIRST + PROGRAMS), STEPS)


@pytest.mark.parametrize("transport", [transport for transport in TRANSPORTS if transport != "threads"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_program_that_loses_a_rank(pool, tmp_path, transport, world):
    """Whatever it is in: what came is right, and what does not come is PeerLost everywhere, soon."""
    stamp = tmp_path / "stamp"
    for seed in range(FIRST, FIRST + PROGRAMS):
        *others, victim = pool.run(lose_a_rank, world, str(stamp), seed, join=transport)
        assert victim.kind == "died" and [one.kind for one in others] == [None] * (world - 1), "\n".join(
            map(str, others)
        )
        assert [one.value[0] for one in others] == ["PeerLost"] * (world - 1), "\n".join(map(str, others))
        assert max(one.value[2] for one in others) < KNOWN_WITHIN_SECONDS
