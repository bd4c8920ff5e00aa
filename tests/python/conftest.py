"""Fixtures of the whole suite."""

import itertools
import os

import pytest

from ranks import TRANSPORTS, WORLDS, Pool

# The built-in rules alone, whatever table this machine's user has.
os.environ["RINGLET_TABLE"] = ""


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """The session's rank processes (ranks.py)."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()


@pytest.fixture(params=list(itertools.product(TRANSPORTS, WORLDS)), ids=lambda place: f"{place[0]}-{place[1]}")
def everyone(request, pool):
    """Runs a function on all ranks of one transport and world; gives what they returned."""
    transport, world = request.param
    return lambda function, *args: pool.values(function, world, *args, join=transport)
