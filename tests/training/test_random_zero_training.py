"""Trainings drawn by lot (random_zero_training.py). RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import os

import pytest

from random_zero_training import run_trainings

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "4"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 25  # so that every kind of step comes


@pytest.mark.parametrize("worlds", [(2, 3), (3, 4), (4, 2)], ids="{0[0]} and then {0[1]}".format)
def test_trainings(pool, tmp_path, worlds):
    """Part of each by some ranks, the rest by another number of them; other programs in each pair of worlds."""
    first = FIRST + PROGRAMS * (worlds[0] - 2)
    seeds = range(first, first + PROGRAMS)
    for world in worlds:
        resumes = world == worlds[1]
        pool.values(run_trainings, world, seeds, STEPS, str(tmp_path), resumes, join="dist:ringlet")
