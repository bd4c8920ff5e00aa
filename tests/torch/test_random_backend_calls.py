"""Programs of torch.distributed drawn by lot (random_backend_calls.py). RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import os

import pytest

from random_backend_calls import run_programs

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "2"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 60


@pytest.mark.parametrize(("world", "join"), [(1, ""), (2, ""), (3, ""), (5, ""), (2, "@mixed"), (4, "@mixed")])
def test_programs_of_torch_distributed(pool, world, join):
    pool.values(run_programs, world, range(FIRST, FIRST + PROGRAMS), STEPS, join="dist:ringlet" + join)
