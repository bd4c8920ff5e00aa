"""Groups that cannot be made: every failure is a ringlet.Error which names ranks, variables and what to do."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import re
import resource
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringlet
from programs import ended, need_namespace, printed, until
from ranks import free_ports, leave_torch, on
from refusals import error_of
from ringlet import _C
from ringlet.claim import Claim, refusal_of
from ringlet.claim import error_of as error_of_refusal
from ringlet.group_key import rendezvous_key
from ringlet.intruders import too_late
from ringlet.store import from_environment

# Seconds that are waited in full: the next one where the machine lets ranks not meet in them.
LIMITS = (1.0, 4.0, 16.0)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


variables = functools.partial(mock.patch.dict, os.environ)


def launched(rank: int, world: int, port: int, **more: str) -> contextlib.AbstractContextManager[None]:
    """As a launcher has set the variables; nothing in them names the job."""
    return variables(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **more)


@mock.patch.object(ringlet.group_key, "_REFUSED_S", 1.0)  # nobody comes later here
def joining(rank: int, world: int, store: str, each: list[dict[str, Any]]) -> str:
    """Each rank joins as its own entry says; env: its variables. What it raises, or "joined"."""
    options = dict(each[rank])
    with variables(**options.pop("env", {})):
        given = {"rank": rank, "world": world, "timeout": 20, "store": dist.FileStore(store, world), **options}
        said = error_of(lambda: ringlet.init(**given), "joined")
        ringlet.finalize()
        return said


@pytest.fixture
def joined(pool, tmp_path) -> Callable[..., list[str]]:
    """What ranks that join so say."""

    numbers = itertools.count()

    def run(*each: dict[str, Any]) -> list[str]:
        store = str(tmp_path / f"store-{next(numbers)}")
        return pool.values(joining, len(each), store, list(each), join="nothing")

    return run


# --- ranks that say different things --------------------------------------------------------------------------------


def test_worlds_that_differ_are_named_on_all_ranks(joined):
    for told in joined({"world": 2}, {"world": 3}):
        assert told == "InvalidUsage: rank 0 says world 2, rank 1 says world 3; all ranks must agree"
    for told in joined({}, {"world": 2}, {}):
        assert told == "InvalidUsage: rank 0 says world 3, rank 1 says world 2; all ranks must agree"
    # The group of two is made; the third is told why nobody answers.
    for limit in LIMITS:
        *made, late = joined({"world": 2}, {"world": 2}, {"timeout": limit})
        assert made == ["joined", "joined"] and "rank 2 of 3 was not joined by rank(s) 0 in time" in late
        if says := "rank 0 says world 2, rank 2 says world 3" in late:
            break
    assert says, late


def test_transports_that_differ_are_named(joined):
    for told in joined({"transport": "tcp"}, {"transport": "shared_memory"}):
        assert told.startswith('InvalidUsage: rank 0 says transport "tcp", rank 1 says transport "shared_memory"')
    for told in joined({}, {"env": {"RINGLET_TRANSPORT": "tcp"}}):
        assert told.startswith('InvalidUsage: rank 0 says transport "auto", rank 1 says transport "tcp"')


def version_of_rank_1(rank: int, world: int, store: str) -> str:
    before, ringlet.__version__ = ringlet.__version__, "0.0.9" if rank == 1 else ringlet.__version__
    try:
        return joining(rank, world, store, [{}, {}])
    finally:
        ringlet.__version__ = before


def test_versions_that_differ_are_named(pool, tmp_path):
    for told in pool.values(version_of_rank_1, 2, str(tmp_path / "store"), join="nothing"):
        assert f"rank 0 runs ringlet {ringlet.__version__}, rank 1 runs ringlet 0.0.9" in told


def test_names_that_differ_are_named(joined):
    for limit in LIMITS:
        first, second = joined({"name": "a", "timeout": limit}, {"name": "b", "timeout": limit})
        assert first.startswith("Timeout: rank 0 of 2 was not joined by rank(s) 1 in time")
        if say := 'name="a"; rank 1 says name="b"' in first and 'name="b"; rank 0 says name="a"' in second:
            break
    assert say, (first, second)


def begins_again(rank: int, world: int, store: str, again: int) -> str:
    """Rank `again` gives up and begins again while the last rank is not there yet."""
    place = dist.FileStore(store, world)
    if rank == again:
        told = error_of(functools.partial(ringlet.init, rank, world, place, timeout=0.6), "joined")
        assert told.startswith("Timeout"), told
        place.set("again", "")
    elif rank == world - 1:
        place.wait(["again"])
        time.sleep(0.3)
    said = error_of(functools.partial(ringlet.init, rank, world, place, timeout=20), "joined")
    if said == "joined":
        assert ringlet.all_reduce(torch.ones(3)).eq(world).all()
    ringlet.finalize()
    return said


@pytest.mark.parametrize("again", [0, 1])
def test_a_rank_may_begin_again_before_the_group_is_made(pool, tmp_path, again):
    assert pool.values(begins_again, 3, str(tmp_path / "store"), again, join="nothing") == ["joined"] * 3


def test_two_processes_of_one_rank(joined):
    # Rank 0 waits for two ranks that never come.
    for told in joined({"world": 4}, {"world": 4}, {"rank": 1, "world": 4}):
        assert told.startswith("InvalidUsage: two processes say that they are rank 1 of 4: process "), told
    for told in joined({}, {"rank": 0}):
        assert told.startswith("InvalidUsage: two processes say that they are rank 0 of 2: process "), told


# --- ranks that fail alone ------------------------------------------------------------------------------------------


# Each in a child of one process of its own: what a limit or a variable has done stays in the process.
ALONE = """
import os, resource, socket, sys, tempfile
import torch, torch.distributed as dist
import ringlet

socket.getaddrinfo("localhost", 1)  # loads what another user may not read

def limited(what, least):
    resource.setrlimit(what, (least, least))

def descriptors(transport, more):
    limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1 + more)
    ringlet.init(0, 1, transport=transport, timeout=5)

def looks():
    global store  # whose end would abort the process without a descriptor
    store = dist.FileStore(os.environ["STORE"], 2)
    limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1)
    ringlet.init(0, 2, store, timeout=5)

def memory(transport):
    pages = int(open("/proc/self/statm").read().split()[0])
    limited(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGESIZE") + (1 << 20))
    ringlet.init(0, 1, transport=transport, timeout=5)
    ringlet.all_reduce(torch.ones(4), async_op=True).wait()

def threads(transport, act):
    os.environ["RINGLET_TABLE"] = ""
    os.setuid(54321)
    if act != "join":
        ringlet.init(0, 1, transport=transport, timeout=5)
    limited(resource.RLIMIT_NPROC, 1)
    if act == "join":
        ringlet.init(0, 1, transport=transport, timeout=5)
    elif act == "call":
        group = ringlet.current().handle
        before = group.sequence
        try:
            ringlet.all_reduce(torch.ones(4), async_op=True)
        finally:
            assert group.sequence == before, "the call has no number, and ranks stay in step"

def serving():
    os.setuid(54321)
    limited(resource.RLIMIT_NPROC, 1)
    ringlet.init(0, 2, timeout=2)

def served():
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        os.setuid(54321)
        limited(resource.RLIMIT_NPROC, 1)
        ringlet.init(1, 2, timeout=2)

def deleted():
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())
    ringlet.init(0, 1, dist.HashStore(), timeout=5)
    raise ringlet.InvalidUsage("joined")

def variable(name, value):
    os.environ[name] = value
    ringlet.init(0, 1, timeout=5)

def child(act, *args):
    if os.fork() == 0:
        try:
            act(*args)
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__module__}.{type(error).__name__}: {error}"
        os.write(1, (repr(told) + chr(10)).encode())
        os._exit(0)
    os.wait()

CASES = [
    (descriptors, "shared_memory", 0), (descriptors, "tcp", 1), (looks,), (memory, "shared_memory"),
    (memory, "tcp"), (memory, "threads"), (threads, "tcp", "join"), (threads, "tcp", "call"), (serving,), (served,),
    (variable, "RINGLET_HEAP_MIB", "abc"), (variable, "RINGLET_HEAP_MIB", "1000000000"),
    (deleted,),
]
for act, *args in CASES:
    child(act, *args)
"""
SAID = [
    r"ResourceError: .*: Too many open files",
    r"ResourceError: .*: Too many open files",
    r"ResourceError: the store that the ranks share: Too many open files; raise ulimit -n",
    r"ResourceError: cannot reserve .* MiB of addresses: Cannot allocate memory",
    r"ResourceError: cannot start a thread for .*: Resource temporarily unavailable; raise the limit on threads",
    r"ResourceError: cannot map the regions of a threads group: Cannot allocate memory",
    r"ResourceError: cannot start a thread for TCP connections: Resource temporarily unavailable; raise the limit",
    r"ResourceError: cannot start a thread for asynchronous calls: Resource temporarily unavailable; raise the limit",
    r"ResourceError: cannot start a thread for a wait in torch: can't start new thread; raise the limit on threads",
    r"ResourceError: cannot start a thread for a wait in torch: can't start new thread; raise the limit on threads",
    r'InvalidUsage: RINGLET_HEAP_MIB="abc" is not a number of MiB from 32 up',
    r"ResourceError: cannot reserve 1000000000 MiB of addresses: Cannot allocate memory .*; lower RINGLET_HEAP_MIB",
    r"InvalidUsage: joined",
]


@AS_ROOT
def test_limits_and_variables(tmp_path):
    given = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "OMP_NUM_THREADS": "1"}
    given["STORE"] = str(tmp_path / "store")
    run = ended(sys.executable, "-c", ALONE, env=given)
    told = [ast.literal_eval(line) for line in run.stdout.splitlines()]
    assert len(told) == len(SAID), run
    wrong = [
        f"{one} instead of {said}"
        for one, said in zip(told, SAID, strict=True)
        if not re.match(f"ringlet.errors.{said}", one)
    ]
    assert not wrong, "\n".join(wrong)


# Ranks of one host need no interface; what TCP says without one is in docs/errors.md.
WITHOUT_INTERFACES = """
import os, sys
import torch.distributed as dist
import ringlet

rank = 1 if os.fork() == 0 else 0
ringlet.init(rank, 2, dist.FileStore(sys.argv[1], 2), timeout=20)
ringlet.finalize()
os.write(1, b"joined" + bytes([10]))
os._exit(0) if rank == 1 else os.wait()
"""


@AS_ROOT
def test_without_any_interface(tmp_path):
    need_namespace("-n")
    run = ended("unshare", "-n", sys.executable, "-c", WITHOUT_INTERFACES, tmp_path / "store")
    assert run.stdout.splitlines() == ["joined"] * 2, run


# --- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, said",
    [
        ({"MASTER_PORT": "99999"}, 'MASTER_PORT="99999" is not a number from 1 to 65535'),
        ({"MASTER_PORT": "abc"}, 'MASTER_PORT="abc" is not a number from 1 to 65535'),
        ({"MASTER_ADDR": ""}, 'MASTER_ADDR="" names no host'),
        ({"MASTER_ADDR": "no.such.host.invalid"}, 'MASTER_ADDR="no.such.host.invalid" cannot be resolved'),
        ({"RANK": "-1"}, 'RANK="-1" is not a number from 0'),
        ({"RANK": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2: they count from 0 to 1"),
        ({"WORLD_SIZE": "0"}, 'WORLD_SIZE="0": a world has at least one rank'),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE="),
    ],
)
def test_variables_that_are_wrong(given, said):
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    with variables(**(usual | given)), pytest.raises(ringlet.InvalidUsage, match=said):
        ringlet.init(timeout=0.3)


def at_own_store(rank: int, world: int, port: str, limit: float) -> str:
    """As under torchrun without a store of its own: rank 0 serves it."""
    with variables(MASTER_ADDR="127.0.0.1", MASTER_PORT=port):
        return error_of(lambda: ringlet.init(rank, world + 1, timeout=limit if rank == 0 else 2 * limit))


def test_a_missing_rank_is_named_where_rank_0_serves_the_store(pool):
    for limit in LIMITS:  # the two that come must meet in it
        first, second = pool.values(at_own_store, 2, str(free_ports(1)[0]), limit, join="nothing")
        if "rank(s) 2 in time" in first:
            break
    assert first.startswith("Timeout: rank 0 of 3 was not joined by rank(s) 2 in time"), first
    # The store ends with rank 0's process; that of this pool goes on.
    assert "rank(s) 2" in second or "the store" in second, second


# --- the table that nobody has named --------------------------------------------------------------------------------


class Counting(dist.Store):
    """Nobody but one rank uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}
        self.looks: list[int] = []  # keys of each

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self.looks.append(len(keys))
        return all(key in self.kept for key in keys)


def test_a_wait_for_many_ranks_looks_for_one():
    """Were each rank to ask for all again and again, the store would have the square of the world to do."""
    store = Counting()
    with pytest.raises(ringlet.Timeout, match=r"rank 0 of 64 was not joined by rank\(s\) 1, 2, .*, 63 in time"):
        _C.Group.join(store, "many", 0, 64, timedelta(seconds=1), "tcp")
    assert len([keys for keys in store.looks if keys > 1]) <= 1 + math.log2(64), store.looks
    assert len(store.looks) < 400, store.looks  # twice for each wait, and 63 for the error


class Interrupted(Counting):
    def check(self, keys: list[str]) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_in_a_store_of_python_is_no_failure_of_the_store():
    with pytest.raises(KeyboardInterrupt):
        _C.Group.join(Interrupted(), "interrupted", 0, 2, timedelta(seconds=5), "tcp")


def with_home(rank: int, world: int, home: str, text: str | None) -> list[str]:
    table = pathlib.Path(home, ".config", "ringlet", "table")
    with variables(HOME=home), warnings.catch_warnings(record=True) as seen:
        del os.environ["RINGLET_TABLE"]
        os.environ.pop("XDG_CONFIG_HOME", None)
        if text is not None:
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text(text)
        else:
            os.chmod(home, 0)
            os.setresuid(1001, 1001, 0)
        try:
            ringlet.init(0, 1, transport="threads", name=home)
            ringlet.finalize()
        finally:
            os.setresuid(0, 0, 0)
            os.chmod(home, 0o700)
    return [str(each.message) for each in seen]


@AS_ROOT
def test_an_optional_table_that_cannot_be_used_warns(pool, tmp_path):
    for text, why in ((None, ": Permission denied"), ("nonsense\n", ', line 1: "nonsense" is not a collective')):
        home = tmp_path / str(text is None)
        home.mkdir()
        (told,) = pool.values(with_home, 1, str(home), text, join="nothing")
        (said,) = told
        assert said.startswith(f"the table of rules is not used: {home}/.config/ringlet/table{why}")


# --- torch's own checks around the backend --------------------------------------------------------------------------


@on(2, "nothing")
def test_under_torchs_detailed_checks(rank: int, world: int, path: str) -> None:
    with variables(TORCH_DISTRIBUTED_DEBUG="DETAIL"):
        dist.set_debug_level_from_env()
        try:
            options = ringlet.BackendOptions(algorithm="ring")
            dist.init_process_group(
                "ringlet", store=dist.FileStore(path, world), rank=rank, world_size=world, pg_options=options
            )
            assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
            module = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.ones_(module.weight)
            ringlet.GradientReducer(module, algorithm="butterfly")
            module(torch.full((1, 2), rank + 1.0)).sum().backward()
            assert module.weight.grad.tolist() == [[1.5, 1.5]]
            with pytest.raises(ringlet.InvalidUsage, match="algorithm must be one of"):
                ringlet.GradientReducer(torch.nn.Linear(2, 2), algorithm="none")
            model = torch.nn.Linear(2, 2)
            zero = ringlet.Zero(model, torch.optim.SGD, lr=0.1)
            model(torch.ones(1, 2)).sum().backward()
            zero.step()
            ringlet.monitored_barrier()
            if rank == 0:
                with pytest.raises(ringlet.Timeout, match="Rank 1 failed to pass monitoredBarrier"):
                    ringlet.monitored_barrier(timeout=0.2)
            dist.barrier()
        finally:
            dist.destroy_process_group()
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
            dist.set_debug_level_from_env()


def with_few_descriptors(rank: int, world: int, port: int, poor: int, transport: str) -> list[str]:
    """The poor rank runs out of them at each place of the handshake in turn."""
    said = []
    serves = rank == (poor + 1) % world
    store = dist.TCPStore("127.0.0.1", port, world, is_master=serves, wait_for_workers=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hosts = {"RINGLET_HOST_ID": f"host {rank % 2}"} if transport == "mixed" else {}
    for more in range(16):
        place = dist.PrefixStore(f"round {more}", store)
        if rank == poor:
            used = {int(number) for number in os.listdir("/proc/self/fd")}
            limit = next(itertools.islice((number for number in itertools.count() if number not in used), more, None))
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with variables(**hosts):
            options = {"transport": "auto" if transport == "mixed" else transport, "timeout": 20}
            said.append(error_of(functools.partial(ringlet.init, rank, world, place, **options), "well"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if said[-1] == "well":
            ringlet.all_reduce(torch.ones(10))
        ringlet.finalize()
        store.set(f"{more} of {rank}", "")
        store.wait([f"{more} of {other}" for other in range(world)])
    store.set(f"over {rank}", "")
    if serves:
        store.wait([f"over {other}" for other in range(world)])
    return said


@pytest.mark.parametrize("poor", range(3))
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "mixed"])
def test_a_rank_without_descriptors_says_so_to_all(pool, transport, poor):
    """No rank has a group that another lacks."""
    each = pool.values(with_few_descriptors, 3, free_ports(1)[0], poor, transport, join="nothing")
    assert each[poor][0] != "well" and each[poor][-1] == "well"
    for told in zip(*each, strict=True):
        if told != ("well",) * 3:
            assert all(one.startswith("ResourceError: ") and "Too many open files" in one for one in told), told
            assert all(f"rank {poor} reported: " in one for rank, one in enumerate(told) if rank != poor), told


WRONG = {
    "RINGLET_TRANSPORT": (
        "TCP",
        "InvalidUsage: RINGLET_TRANSPORT must be one of auto, shared_memory, tcp, threads, got .TCP.",
    ),
    "RINGLET_LOG": ("loud", 'InvalidUsage: RINGLET_LOG="loud" is not one of'),
    "RINGLET_LOG_FILE": ("/nonexistent/log", "ResourceError: RINGLET_LOG_FILE=/nonexistent/log"),
    "RINGLET_ALGORITHMS": ("/nonexistent.py", "InvalidUsage: RINGLET_ALGORITHMS: "),
    "RINGLET_CPU_KERNELS": (
        "nope",
        'InvalidUsage: RINGLET_CPU_KERNELS="nope" is not one of .*, which this processor and build support',
    ),
}


def with_a_wrong_variable(rank, world, port):
    """What ranks say if one of them has a wrong variable: by who that is, the variable, and how they join."""
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=20))
    said = {}
    for poor, name in itertools.product(range(world), WRONG):
        value, _ = WRONG[name]
        wrong = {name: value, **({"RINGLET_LOG": "warning"} if name == "RINGLET_LOG_FILE" else {})}
        for way in ("init", "backend"):
            place = dist.PrefixStore(f"{poor} {name} {way}", store)
            with variables(**wrong if rank == poor else {}):
                if way == "init":
                    act = functools.partial(ringlet.init, rank, world, place, timeout=20)
                else:
                    given = {"store": place, "rank": rank, "world_size": world, "timeout": timedelta(seconds=20)}
                    act = functools.partial(dist.init_process_group, "ringlet", **given)
                began = time.monotonic()
                said[poor, name, way] = error_of(act, "nothing"), time.monotonic() - began
            if dist.is_initialized():
                dist.destroy_process_group()
            store.set(f"{poor} {name} {way} {rank}", "")
            store.wait([f"{poor} {name} {way} {other}" for other in range(world)])
    dist.distributed_c10d._world.group_count = 0  # torch counts failed groups, too: the next one's keys would differ
    return said


def test_all_ranks_hear_of_a_wrong_variable(pool):
    each = pool.values(with_a_wrong_variable, 3, free_ports(1)[0], join="nothing")
    for case in each[0]:
        poor, name, _ = case
        told = [said[case] for said in each]
        _, text = WRONG[name]
        assert re.match(text, told[poor][0]), (case, told)
        kind, text = text.split(": ", 1)
        reported = f"{kind}: rank {poor} reported: {text}"
        assert all(re.match(reported, one) for rank, (one, _) in enumerate(told) if rank != poor), (case, told)
        assert all(seconds < 10 for _, seconds in told), (case, told)


def test_a_refusal_keeps_its_words():
    for text in ('X="a\x1fb" is wrong', "InvalidUsage: plain", "Timeout", ""):
        for kind in (ringlet.ResourceError, ringlet.InvalidUsage):
            error = error_of_refusal(refusal_of(1, kind(text)))
            assert (type(error), str(error), error.reported) == (kind, f"rank 1 reported: {text}", True)
        plain = error_of_refusal(text)
        assert (type(plain), str(plain), plain.reported) == (ringlet.InvalidUsage, text, False)


def joins_as_launched(rank, world, port, of_threads, way):
    launched = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    wrong = {"RINGLET_TRANSPORT": "threads"} if rank in of_threads else {}
    with variables(TORCHELASTIC_RUN_ID=str(port), **launched, **wrong), pytest.raises(ringlet.InvalidUsage) as raised:
        if way == "init":
            ringlet.init(timeout=20)
        else:
            dist.init_process_group("ringlet", timeout=timedelta(seconds=20))
    dist.distributed_c10d._world.group_count = 0  # torch counts failed groups, too: the next one's keys would differ
    return str(raised.value), raised.value.reported


@pytest.mark.parametrize("of_threads", [{0}, {1}, {0, 1, 2}])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("init", "joins threads of one process, which pass rank= and world="),
        ("backend", "works with ringlet.init() only"),
    ],
)
def test_launched_processes_are_no_threads(pool, of_threads, way, words):
    """Nor do they wait for one another in their own process."""
    told = pool.values(joins_as_launched, 3, free_ports(1)[0], of_threads, way, join="nothing")
    for rank, (text, reported) in enumerate(told):
        assert reported == (rank not in of_threads) == text.startswith("rank "), told
        assert f'transport "threads" {words}' in text, told


def test_threads_may_have_their_world_from_the_environment():
    def joins(rank):
        world = ringlet.init(rank, transport="threads", name="of the environment", timeout=20).world
        ringlet.finalize()
        return world

    with variables(RANK="0", WORLD_SIZE="2"), concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(joins, range(2))) == [2, 2]


def slurm(job: str, rank: int) -> dict[str, str]:
    given = {"JOB_ID": job, "STEP_ID": "0", "PROCID": str(rank), "STEP_NUM_TASKS": "2", "LOCALID": str(rank)}
    given |= {"STEP_NODELIST": "localhost", "STEP_NUM_NODES": "1"}
    return {f"SLURM_{name}": value for name, value in given.items()}


def torchruns(job: str, rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": job}


@pytest.mark.parametrize("launcher", [slurm, torchruns])
def test_two_jobs_of_one_port_do_not_mix(launcher, monkeypatch):
    port = free_ports(1)[0]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with variables(**place, **launcher("1", 0)):
        serving = from_environment(0, 2, timedelta(seconds=20))
    said = f"127.0.0.1:{port} .* belongs to job .*1.*, this rank to job .*2.*: set another MASTER_PORT"
    monkeypatch.setattr("ringlet.store._kept", {})  # as in processes of their own
    with variables(**place, **launcher("2", 1)), pytest.raises(ringlet.InvalidUsage, match=said):
        from_environment(1, 2, timedelta(seconds=20))
    with variables(**place, **launcher("1", 0)):  # the program may number the job's ranks anew
        from_environment(1, 2, timedelta(seconds=20)).set("hello", "")
    assert serving.check(["hello"])


def of_two_jobs(rank: int, world: int, port: int, late: tuple[int, ...], folder: str, apart: bool) -> str:
    """Ranks 0 and 1 of one job, and of another; nothing names the jobs. `late` ones come when the others have begun.
    apart: the jobs were started from two shells."""
    job = rank // 2
    origin = [socket.gethostname(), f"{job} on here"] if apart else ["here"]
    begun = pathlib.Path(folder) / "begun"
    until(lambda: rank not in late or begun.exists())

    def train() -> str:
        ringlet.init(timeout=60)
        total = over = 0.0
        while not over:  # until the other job's ranks have been told, or this one is
            ended = len(list(pathlib.Path(folder).glob("over *")))
            own = torch.tensor([10.0**job, apart and 1 not in late and ended == 2])
            total, over = ringlet.all_reduce(own).tolist()
            begun.touch()
            time.sleep(0.01)
        return f"trained {total:g}"

    with (
        mock.patch.object(ringlet.claim, "_origin", lambda: origin),
        launched(rank % 2, 2, port),
    ):
        said = error_of(train)
        ringlet.finalize()
        (pathlib.Path(folder) / f"over {rank}").touch()
        return said


TWICE = "two processes say that they are rank"


def test_two_jobs_that_nothing_names_and_that_start_together(pool, tmp_path):
    for _ in range(3):
        told = pool.values(of_two_jobs, 4, free_ports(1)[0], (), str(tmp_path), False, join="nothing")
        assert not any(one.startswith(("trained", "Timeout")) for one in told), told
        assert not (tmp_path / "begun").exists(), "no call of ranks of two jobs"
        assert sum(TWICE in one for one in told) >= 2, told


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("late", [(1, 2), (2, 3)])
def test_two_jobs_that_nothing_names_one_after_the_other(pool, tmp_path, late, apart):
    """The first rank 1 that comes is in the group, of whatever job it is."""
    told = pool.values(of_two_jobs, 4, free_ports(1)[0], late, str(tmp_path), apart, join="nothing")
    assert told[2].startswith("ResourceError: rank 0 cannot serve"), told
    surplus, member = (1, 3) if 1 in late else (3, 1)
    assert re.match(f"InvalidUsage: {TWICE} 1 of 2: .* which is in a group, and .* set another port", told[surplus])
    if apart and member == 1:  # plainly of rank 0's job
        assert [told[0], told[1]] == ["trained 2", "trained 2"]
    else:
        assert re.match(f"PeerLost: .*may have ranks of two jobs: {TWICE} 1 of 2", told[0]), told
        assert re.match("PeerLost: .* rank 0 left the group", told[member]), told


def without_a_watch(rank: int, world: int, port: int) -> str:
    refusal = ringlet.ResourceError("no thread for it")
    with (
        mock.patch.object(ringlet.intruders, "start", mock.Mock(side_effect=refusal)),
        launched(rank, world, port),
    ):
        said = error_of(lambda: (ringlet.init(timeout=60), ringlet.barrier()), "joined")
        ringlet.finalize()
        return said


def test_a_rank_0_that_cannot_watch_tells_all(pool):
    began = time.monotonic()
    first, second = pool.values(without_a_watch, 2, free_ports(1)[0], join="nothing")
    assert first == "ResourceError: no thread for it"
    assert re.match("PeerLost: rank 1 of 2 .* rank 0 left the group", second), second
    assert time.monotonic() < began + 30


def test_who_comes_late_for_a_rank(monkeypatch):
    """A process that replaces one that has ended, or that has left and joins again, waits for the next group."""
    store = dist.HashStore()
    past = printed("sh", "-c", "echo $$").strip()
    for process, refused in ((f"process {past}", False), (f"process {os.getppid()}", True)):
        claims = [Claim(r, 2, "auto", process=f"{process} on {socket.gethostname()}") for r in range(2)]
        store.set("name/members", json.dumps([claim.text() for claim in claims]))
        assert bool(too_late(store, "name", Claim(1, 2, "auto"))) == refused
        assert not too_late(store, "name", Claim(2, 3, "auto"))
        assert not too_late(store, "name", claims[1])
    store.set("name/members", "")
    assert not too_late(store, "name", Claim(1, 2, "auto"))


def many_rounds(rank: int, world: int, port: int, rounds: int) -> int:
    """Every third group outlives its round."""
    kept = []
    with launched(rank, world, port):
        for number in range(rounds):
            group = ringlet.init(timeout=30)
            assert ringlet.all_reduce(torch.ones(4)).tolist() == [world] * 4
            if number % 3 == 0:
                kept.append(group)
            del group
            ringlet.finalize()
    return len(kept)


def test_a_program_may_leave_and_join_again(pool):
    assert pool.values(many_rounds, 3, free_ports(1)[0], 150, join="nothing") == [50] * 3


def beside_torch(rank: int, world: int, port: int, backend: str, torch_first: bool) -> list[float]:
    with launched(rank, world, port):
        joins = [lambda: dist.init_process_group(backend), lambda: ringlet.init(timeout=20)]
        for join in joins if torch_first else reversed(joins):
            join()
        try:
            ours, theirs = torch.full((4,), rank + 1.0), torch.full((4,), rank + 10.0)
            dist.all_reduce(theirs)
            return [float(ringlet.all_reduce(ours)[0]), float(theirs[0])]
        finally:
            leave_torch(backend)
            ringlet.finalize()


@pytest.mark.parametrize("torch_first", [True, False])
@pytest.mark.parametrize("backend", ["gloo", "ringlet"])
def test_beside_torchs_own_group_at_the_same_address(pool, backend, torch_first):
    port = free_ports(1)[0]
    for _ in range(2 if backend == "ringlet" else 1):  # gloo would take the addresses of its last group there
        assert pool.values(beside_torch, 2, port, backend, torch_first, join="nothing") == [[3.0, 21.0]] * 2


class SlowLook:
    """A store in which rank 1 has seen that rank 0 is there, and reads who it is when rank 0 has the group."""

    def __init__(self) -> None:
        self.inner, self.looking, self.led = dist.HashStore(), threading.Event(), threading.Event()
        self.inner.set_timeout(timedelta(seconds=5))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check(self, keys: list[str]) -> bool:
        there = self.inner.check(keys)
        if there and threading.current_thread().name == "1" and keys == ["name/hello/0"]:
            self.looking.set()
            assert self.led.wait(20)
        return there


def test_who_looks_at_a_rank_that_has_its_group_waits_for_nobody():
    store, keys, limit = SlowLook(), {}, timedelta(seconds=30)

    def rank(number: int) -> None:
        if number == 2:
            assert store.looking.wait(20)
        keys[number] = rendezvous_key(store, "name", Claim(number, 3, "auto"), limit)
        if number == 0:
            store.led.set()

    ranks = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(keys) == 3 and len(set(keys.values())) == 1


def at_a_port_of_its_own(rank: int, world: int, port: int) -> float:
    """As under torchrun, whose agent serves another port."""
    with launched(rank, world, port, TORCHELASTIC_USE_AGENT_STORE="True"):
        ringlet.init(timeout=20)
        try:
            return float(ringlet.all_reduce(torch.ones(1)))
        finally:
            ringlet.finalize()


def test_a_program_under_torchrun_may_set_another_port(pool):
    assert pool.values(at_a_port_of_its_own, 2, free_ports(1)[0], join="nothing") == [2.0, 2.0]
