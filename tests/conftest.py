"""Fixtures of the whole suite."""

import itertools
import os
import pathlib
import signal

import pytest

import emulated_gpu
from ranks import TRANSPORTS, WORLDS, Pool

# The built-in rules alone, whatever table this machine's user has.
os.environ["RINGLET_TABLE"] = ""
# A shell starts what runs in its background with SIGINT ignored, and ranks would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that `make test` leaves to `make test-all`, each with what makes it slow.
SLOW = {
    "core/test_across_hosts.py": "makes emulated hosts, and takes their links away",
    "core/test_environment.py": "makes emulated hosts",
    "core/test_forked_children.py": "starts programs that fork",
    "core/test_hosts.py": "makes emulated hosts",
    "core/test_interrupts.py": "interrupts every kind of wait, when it has begun",
    "core/test_launching.py": "starts torchrun, mpirun and emulated hosts",
    "core/test_slurm.py": "starts Slurm",
    "emulated_gpu/test_gpu_check.py": "starts the GPU check's parts",
    "emulated_gpu/test_gpu_code.py": "disassembles the kernels",
    "tools/test_bench.py": "measures libraries side by side",
    "tools/test_bench_calls.py": "measures every call of torch.distributed",
    "tools/test_bench_hosts.py": "measures on emulated hosts",
    "tools/test_explore_in_browser.py": "drives a browser",
    "tools/test_tune.py": "measures algorithms",
    "torch/test_compiled.py": "compiles models",
    "torch/test_torch_stack.py": "compiles, and trains with FSDP and tensor parallelism",
    "training/test_full_batch_equivalence.py": "trains the demo's model, and starts the examples",
    "training/test_zero_examples.py": "starts the examples",
    "training/test_zero_memory.py": "trains models large enough to be measured",
}


def pytest_collection_modifyitems(items):
    folder = pathlib.Path(__file__).parent
    for item in items:
        if why := SLOW.get(item.path.relative_to(folder).as_posix()):
            item.add_marker(pytest.mark.slow(reason=why))


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
