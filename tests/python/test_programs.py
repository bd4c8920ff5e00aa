"""Programs drawn by lot (programs.py) on every transport and world. RINGLET_TEST_PROGRAMS asks for more of them."""

from __future__ import annotations

import os

from programs import run_programs

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "1"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 60


def test_programs(everyone):
    everyone(run_programs, range(FIRST, FIRST + PROGRAMS), STEPS)
