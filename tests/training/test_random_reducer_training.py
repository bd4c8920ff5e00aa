"""Random trainings under the gradient reducer. RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import os

import pytest

from random_reducer_training import run_trainings

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "2"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 12


@pytest.mark.parametrize("backend", ["gloo", "ringlet"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_trainings(pool, backend, world):
    pool.values(run_trainings, world, range(FIRST, FIRST + PROGRAMS), STEPS, join=f"dist:{backend}")
