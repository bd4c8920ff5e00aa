"""Fixtures of the whole suite."""

import fnmatch
import gc
import inspect
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

# What `make test` leaves to `make test-all`, files and tests (as fnmatch knows them), each with what makes it slow.
SLOW = {
    "core/test_across_hosts.py": "makes emulated hosts, and takes their links away",
    "core/test_contract.py::test_every_dtype_and_op*shared_memory-8-*": "has eight ranks; five are tried",
    "core/test_contract.py::test_every_dtype_and_op*mixed-5-*": "tcp has five ranks, too",
    "core/test_contract.py::test_messages_of_many_segments*mixed*": "shared_memory and tcp have them, too",
    "core/test_contract.py::test_more_segments*mixed*": "tcp has them, too",
    "core/test_environment.py": "makes emulated hosts",
    "core/test_failure.py::test_*threads]": "waits for timeouts of the engine that shared_memory has, too",
    "core/test_failure.py::test_*mixed]": "waits for timeouts of the engine that tcp has, too",
    "core/test_forked_children.py": "starts programs that fork",
    "core/test_hosts.py": "makes emulated hosts",
    "core/test_interrupts.py": "interrupts every kind of wait, when it has begun",
    "core/test_launching.py": "starts torchrun, mpirun and emulated hosts",
    "core/test_refusals.py::test_spawn_shows*shared_memory*": "starts Python anew; threads are told the same",
    "core/test_refusals.py::test_spawn_shows_the_traceback*": "starts Python anew; threads are told the same",
    "core/test_selection.py::test_the_store_ends*": "starts Python anew for three ranks",
    "core/test_slurm.py": "starts Slurm",
    "emulated_gpu/test_gpu_check.py": "starts the GPU check's parts",
    "emulated_gpu/test_gpu_code.py": "disassembles the kernels",
    "tools/test_algorithm_files.py::test_measured*": "measures algorithms",
    "tools/test_bench.py": "measures libraries side by side",
    "tools/test_bench_hosts.py": "measures on emulated hosts",
    "tools/test_builds.py::test_all_ways*": "measures builds side by side",
    "tools/test_cli.py::test_doctor_finds*": "joins several ranks of the command line",
    "tools/test_docs.py::test_example_runs_as_a_program[[]docs*": "starts ranks, as the README's does",
    "tools/test_error_samples.py::*[[]stuck*": "waits for timeouts",
    "tools/test_error_samples.py::*disagreeing]": "waits for a timeout",
    "tools/test_error_samples.py::*against collective]": "waits for a timeout",
    "tools/test_error_samples.py::*[[]store]": "waits for a timeout",
    "tools/test_error_samples.py::*no interface]": "starts Python anew",
    "tools/test_error_samples.py::*full heap]": "starts Python anew",
    "tools/test_explore_in_browser.py": "drives a browser",
    "tools/test_site.py": "builds the site",
    "tools/test_wheel.py": "builds a wheel, and installs it into an empty environment",
    "tools/test_tune.py": "measures algorithms",
    "torch/test_compiled.py": "compiles models",
    "torch/test_random_backend_calls.py::*[[][13]-*": "the same in other worlds",
    "torch/test_torch_stack.py": "compiles, and trains with FSDP and tensor parallelism",
    "training/*gloo-[34]*": "the same on gloo in a larger world; on ringlet it is tried",
    "training/test_random_reducer_training.py::*-4]": "the same in a larger world",
    "training/test_random_zero_training.py::*[[][34] and*": "the same in larger worlds",
    "training/test_examples.py": "starts the examples",
    "training/test_zero_memory.py": "trains models large enough to be measured",
}


# What runs by itself, after the others, which run two at a time: each with what would suffer.
ALONE = {
    "core/test_across_hosts.py": "takes links away",
    "core/test_environment.py": "makes emulated hosts",
    "core/test_failure.py::test_killed*": "measures how soon a failure is known",
    "core/test_failure.py::test_stalled*": "measures when a wait ends",
    "core/test_random_calls.py::test_a_program_that_loses_a_rank*": "measures how soon a failure is known",
    "core/test_hosts.py": "makes emulated hosts, and measures their links",
    "core/test_interrupts.py": "measures when a wait ends",
    "core/test_launching.py": "makes emulated hosts",
    "core/test_slurm.py": "makes emulated hosts",
    "emulated_gpu/test_gpu_check.py": "measures when a part that hangs is ended",
    "tools/test_algorithm_files.py::test_measured*": "measures",
    "tools/test_bench.py": "measures",
    "tools/test_bench_hosts.py": "measures",
    "tools/test_tune.py": "measures",
    "training/test_bucket_merging.py::test_layouts*": "measures what a bucket costs",
    "training/test_delay_and_timeline.py": "measures when buckets are sent",
}


def place_of(item):
    return item.path.relative_to(pathlib.Path(__file__).parent).as_posix()


def named_in(table, item):
    """Why, where the table names the test or its file."""
    file = place_of(item)
    test = f"{file}::{item.name}"
    return next((why for pattern, why in table.items() if pattern == file or fnmatch.fnmatchcase(test, pattern)), None)


def pytest_collection_finish():
    """What is imported by now stays: no collection looks at it again, here or in the processes forked from here."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    for item in items:
        if why := named_in(SLOW, item):
            item.add_marker(pytest.mark.slow(reason=why))
        if why := named_in(ALONE, item):
            item.add_marker(pytest.mark.alone(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """`make test-launchers` installs what these tests need: one that skips itself there has not been run anywhere."""
    report = yield
    if report.skipped and os.environ.get("RINGLET_TEST_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"RINGLET_TEST_NO_SKIPS is set, and this was: {report.longrepr}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test of `ranks.on` on its ranks."""
    marker = pyfuncitem.get_closest_marker("on")
    if marker is None:
        return None
    world, *joins = marker.args
    fixture = pyfuncitem._request.getfixturevalue
    names = [name for name in inspect.signature(pyfuncitem.obj).parameters if name not in ("rank", "world")]
    given = [pyfuncitem.funcargs[name] for name in names]
    if isinstance(world, str):
        fixture(world)(pyfuncitem.obj, *given)
    else:
        world = pyfuncitem.funcargs["world"] or world
        join = fixture("join") if len(joins) > 1 else (*joins, "shared_memory")[0]
        fixture("device_pool" if join == "gpu" else "pool").values(pyfuncitem.obj, world, *given, join=join)
    return True


@pytest.fixture
def join(request):
    """Of a test of `ranks.on` that runs once for each of several."""
    return request.param


@pytest.fixture
def rank():
    """In a test of `ranks.on`; each rank gets its own."""


world = rank


@pytest.fixture
def folder(tmp_path):
    """The path of an empty folder, for ranks."""
    return str(tmp_path)


@pytest.fixture
def path(tmp_path):
    """Of a store beside a group's own."""
    return str(tmp_path / "store")


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """The session's rank processes (ranks.py)."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()


@pytest.fixture
def own_pool(tmp_path):
    """Fresh processes, for what one chooses once: its kernels, its heap."""
    pool = Pool(tmp_path)
    yield pool
    pool.end()


@pytest.fixture
def two(pool):
    """Runs a function on two ranks of a process group on ringlet."""
    return lambda function, *args: pool.values(function, 2, *args, join="dist:ringlet")


@pytest.fixture(params=[("gloo", 2), ("gloo", 4), ("ringlet", 2), ("ringlet", 4)], ids="{0[0]}-{0[1]}".format)
def ranks(request, pool):
    """Runs a function on the ranks of torch.distributed, of either backend and of two worlds."""
    backend, world = request.param
    return lambda function, *args: pool.values(function, world, *args, join=f"dist:{backend}")


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


# Where `everyone` tries a function. The C++ tests have every algorithm in more worlds, and RINGLET_TEST_WORLDS asks for
# others.
PLACES = {"shared_memory": (1, 2, 3, 5, 8), "threads": (1, 3), "tcp": (2, 5), "mixed": (3, 5)}


def places():
    for transport, world in itertools.product(TRANSPORTS, WORLDS):
        if world in PLACES[transport] or "RINGLET_TEST_WORLDS" in os.environ:
            yield pytest.param((transport, world), id=f"{transport}-{world}")


@pytest.fixture(params=places())
def everyone(request, pool):
    """Runs a function on all ranks of one transport and world; gives what they returned."""
    transport, world = request.param
    return lambda function, *args: pool.values(function, world, *args, join=transport)
