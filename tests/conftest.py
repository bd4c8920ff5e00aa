"""Fixtures of the whole suite."""

import itertools
import os
import signal

import pytest

import emulated_gpu
from ranks import TRANSPORTS, WORLDS, Pool

# The built-in rules alone, whatever table this machine's user has.
os.environ["RINGLET_TABLE"] = ""
# A shell starts what runs in its background with SIGINT ignored, and ranks would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """The session's rank processes (ranks.py)."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def device_pool(tmp_path_factory):
    """A process of its own for what has the GPU of emulated_gpu.py: torch keeps a device that it was given."""
    pool = Pool(tmp_path_factory.mktemp("device_ranks"))
    yield pool
    pool.end()


@pytest.fixture
def way(device_pool, request):
    """What groups that `device_pool` makes meanwhile go through, one of emulated_gpu.WAYS."""
    device_pool.values(emulated_gpu.go, 1, request.param, join="nothing")
    yield request.param
    device_pool.values(emulated_gpu.go, 1, "both", join="nothing")


@pytest.fixture(params=list(itertools.product(TRANSPORTS, WORLDS)), ids=lambda place: f"{place[0]}-{place[1]}")
def everyone(request, pool):
    """Runs a function on all ranks of one transport and world; gives what they returned."""
    transport, world = request.param
    return lambda function, *args: pool.values(function, world, *args, join=transport)
