"""Random trainings under the gradient reducer. RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import os

import pytest

from random_reducer_training import run_trainings

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "6"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 28  # so that every kind of step comes


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", "ringlet"])
def test_trainings(pool, backend, world):
    """Other programs in each group: the first options of a program go by its number."""
    first = FIRST + PROGRAMS * (world - 2 + 3 * (backend == "gloo"))
    pool.values(run_trainings, world, range(first, first + PROGRAMS), STEPS, join=f"dist:{backend}")
