"""Programs that provoke the errors which docs/errors.md shows; tests/tools/test_error_samples.py compares the words.

Each entry of SAMPLES runs a program on ranks of the pool and gives all texts that the ranks saw, as "Kind: message".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist

import ringlet
import stalls
from programs import ended
from ranks import Pool, free_ports, on_host
from refusals import error_of


def of_ranks(pool: Pool, function: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[str]:
    """The texts of all ranks that lived; a rank gives one or a list of them."""
    found: list[str] = []
    for outcome in pool.run(function, world, *args, **options):
        value = outcome.value if outcome.value is not None else f"{outcome.kind}: {outcome.message}"
        found += [value] if isinstance(value, str) else value
    return found


def with_store(pool: Pool, function: Callable[..., Any], world: int) -> list[str]:
    """The function gets the path of a store beside the group's own, to say when a rank has seen enough."""
    with tempfile.TemporaryDirectory() as folder:
        return of_ranks(pool, function, world, f"{folder}/store")


# --- refused before anything moves ----------------------------------------------------------------------------------


def refusals(rank: int, world: int) -> list[str]:
    x, square, leaf = torch.ones(4), torch.ones(4, 4), torch.ones(4, requires_grad=True)
    both, six = torch.ones(8), torch.ones(6)
    emptied = torch.ones(4)
    emptied.untyped_storage().resize_(0)
    acts = [
        lambda: ringlet.send(square.t(), 1 - rank),
        lambda: ringlet.all_reduce(torch.ones(1).expand(4)),
        lambda: ringlet.all_gather([x, x], torch.ones(4)),
        lambda: ringlet.all_reduce(leaf * 2, "max"),
        lambda: ringlet.all_reduce(torch.ones(4, dtype=torch.uint16)),
        lambda: ringlet.all_reduce(x, timeout=float("nan")),
        lambda: ringlet.all_reduce(torch.ones(4, dtype=torch.complex64).conj()),
        lambda: ringlet.all_reduce(emptied),
        lambda: ringlet.all_reduce(x, "band"),
        lambda: ringlet.all_reduce(x, algorithm="rings"),
        lambda: ringlet.all_reduce(x, "mean"),
        lambda: ringlet.broadcast(x, 7),
        lambda: ringlet.reduce_scatter(torch.ones(3), torch.ones(7)),
        lambda: ringlet.all_to_all(both[:6], both[2:]),
        lambda: ringlet.reduce_scatter(six[1:4], six),
    ]
    return [error_of(act) for act in acts]


def without_group(rank: int, world: int) -> list[str]:
    texts = [error_of(lambda: ringlet.all_reduce(torch.ones(4)))]
    ringlet.init(0, 1, timeout=20)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, error_of(lambda: ringlet.all_reduce(torch.ones(4))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    texts.append(os.read(reading, 1 << 16).decode())
    ringlet.finalize()
    return texts


def reducer_refusals(rank: int, world: int) -> list[str]:
    def module() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    frozen = module()
    frozen[0].weight.requires_grad_(False)
    ringlet.GradientReducer(frozen)
    frozen[0].weight.requires_grad_(True)
    both = module()
    ringlet.GradientReducer(both)
    wrapped = torch.nn.parallel.DistributedDataParallel(both)
    return [
        error_of(lambda: frozen(torch.ones(1, 2))),
        error_of(lambda: wrapped(torch.ones(1, 2)).sum().backward()),
        error_of(lambda: ringlet.GradientReducer(module(), bucket_mb=float("nan"))),
    ]


def refused(pool: Pool) -> list[str]:
    return of_ranks(pool, refusals, 2) + of_ranks(pool, without_group, 1, join="nothing")


def refused_by_the_reducer(pool: Pool) -> list[str]:
    return of_ranks(pool, reducer_refusals, 1, join="dist:ringlet")


# --- calls that do not match ----------------------------------------------------------------------------------------


def other_counts(rank: int, world: int) -> str:
    return error_of(lambda: ringlet.all_reduce(torch.ones(1024 if rank else 1000)))


def other_collectives(rank: int, world: int) -> str:
    x = torch.ones(10)
    return error_of(lambda: ringlet.broadcast(x, 0) if rank else ringlet.all_reduce(x))


def other_messages(rank: int, world: int) -> list[str]:
    message = torch.ones(6 if rank else 5)
    first = error_of(lambda: ringlet.recv(message, 0) if rank else ringlet.send(message, 1))
    return [first, error_of(ringlet.barrier)]


# --- ranks that end or do not come ----------------------------------------------------------------------------------


def killed_in_a_loop(rank: int, world: int, path: str) -> list[str]:
    store = dist.FileStore(path, world)
    x = ringlet.empty(4 << 20).fill_(1)
    for _ in range(200):
        ringlet.all_reduce(x, "max")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:  # so that rank 0 is the first to notice
        store.wait(["noticed"])
    text = error_of(lambda: ringlet.all_reduce(x))
    store.set("noticed", "")
    return [text, error_of(lambda: ringlet.all_reduce(x))]


def leaves_early(rank: int, world: int) -> str:
    if rank == 1:
        ringlet.finalize()
        return "left"
    return error_of(lambda: ringlet.all_reduce(torch.ones(8)))


def is_interrupted(rank: int, world: int, path: str) -> str:
    store = dist.FileStore(path, world)
    if rank == 0:
        stalls.later(0.3, os.kill, os.getpid(), signal.SIGINT)
    if rank == 2:
        store.wait(["interrupted"])
    text = error_of(lambda: ringlet.all_reduce(torch.ones(1 << 20)))
    if rank == 0:
        store.set("interrupted", "")
    return text


def is_stopped(rank: int, world: int) -> str:
    x = torch.ones(1 << 20)
    for _ in range(5):
        ringlet.all_reduce(x, algorithm="ring")
    if rank == 3:
        child = os.fork()
        if child == 0:  # wakes its parent, long after the others' timeout
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    return error_of(lambda: ringlet.all_reduce(x, algorithm="ring", timeout=2 if rank == 1 else 20))


def message_against_collective(rank: int, world: int) -> str:
    ringlet.all_reduce(torch.ones(10))
    x = torch.ones(1000)
    return error_of(lambda: ringlet.all_reduce(x, timeout=20) if rank else ringlet.recv(x, 1, timeout=2))


# --- between hosts: each rank on one of its own ---------------------------------------------------------------------


def on_four_hosts(rank: int, world: int, path: str, killed: bool) -> str:
    store = dist.FileStore(path, world)
    with on_host(f"host {rank}"):
        ringlet.init(rank, world, store, timeout=20)
    x = torch.ones(4 << 20)
    for _ in range(20):
        ringlet.all_reduce(x, "max", algorithm="ring")
    if rank == 3 and killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:  # in other work
        store.wait(["rank 1"])
    if rank > 0 and killed:  # so that ranks notice in this order
        store.wait([f"rank {rank - 1}"])
    text = error_of(lambda: ringlet.all_reduce(x, algorithm="ring", timeout=20 if killed or rank != 1 else 3))
    store.set(f"rank {rank}", "")
    ringlet.finalize()
    return text


def between_hosts(pool: Pool, killed: bool) -> list[str]:
    pool.end()  # a process has one host
    with tempfile.TemporaryDirectory() as folder:
        return of_ranks(pool, on_four_hosts, 4, f"{folder}/store", killed, join="nothing")


# --- rendezvous -----------------------------------------------------------------------------------------------------


def joins(rank: int, world: int, path: str, each: list[dict[str, Any]]) -> str:
    options = {"rank": rank, "world": world, "timeout": 1.0, "store": dist.FileStore(path, world), **each[rank]}
    text = error_of(lambda: ringlet.init(**options))
    ringlet.finalize()
    return text


def joined(pool: Pool, *each: dict[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return of_ranks(pool, joins, len(each), f"{folder}/store", list(each), join="nothing")


def with_variables(rank: int, world: int, names: dict[str, str], arguments: tuple[Any, ...]) -> str:
    with mock.patch.dict(os.environ, names):
        return error_of(lambda: ringlet.init(*arguments, timeout=0.5))


class Broken(dist.Store):
    """A store whose process is gone."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nframe #0")


def store_of(pool: Pool) -> list[str]:
    found = joined(pool, {"world": 3}, {"world": 3})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        found += of_ranks(pool, with_variables, 1, busy, (0, 2), join="nothing")
    free = busy | {"MASTER_PORT": str(free_ports(1)[0])}
    found += of_ranks(pool, with_variables, 1, free, (1, 2), join="nothing")
    return [*found, error_of(lambda: ringlet.init(1, 2, Broken(), timeout=1))]


def disagreeing(pool: Pool) -> list[str]:
    found = joined(pool, {"world": 2}, {"world": 3})
    found += joined(pool, {"transport": "tcp"}, {"transport": "shared_memory"})
    return found + joined(pool, {"world": 4}, {"world": 4}, {"rank": 1, "world": 4})


def wrong_variables(pool: Pool) -> list[str]:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    found = []
    for wrong in ({"MASTER_PORT": "99999"}, {"RANK": "2"}):
        found += of_ranks(pool, with_variables, 1, usual | wrong, (), join="nothing")
    return found + of_ranks(pool, with_variables, 1, {}, (), join="nothing")


def apart(rank: int, world: int, path: str) -> str:
    """Rank 1 in a network namespace of its own, which its process keeps."""
    if rank == 1:
        ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
    return joins(rank, world, path, [{"transport": "shared_memory", "timeout": 5.0}] * world)


def as_two_users(rank: int, world: int, path: str) -> str:
    if rank == 1:
        os.setresuid(1001, 1001, 0)
    try:
        return joins(rank, world, path, [{"transport": "shared_memory", "timeout": 5.0}] * world)
    finally:
        os.setresuid(0, 0, 0)


def two_users(pool: Pool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = pathlib.Path(folder, "store")
        path.touch()
        path.chmod(0o666)
        return of_ranks(pool, as_two_users, 2, str(path), join="nothing")


def in_two_namespaces(pool: Pool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        found = of_ranks(pool, apart, 2, f"{folder}/store", join="nothing")
    pool.end()
    return found


def of_program(call: str, before: tuple[str, ...] = (), **options: Any) -> list[str]:
    """What the call raises in a Python of its own."""
    program = f"import ringlet\ntry: {call}\n"
    program += "except ringlet.Error as error: print(f'{type(error).__name__}: {error}')"
    run = ended(*before, sys.executable, "-c", program, **options)
    return [run.stdout.strip() or run.stderr]


def without_interface(pool: Pool) -> list[str]:
    return of_program("ringlet.init(0, 1, transport='tcp', timeout=5)", before=("unshare", "-n"))


# --- memory ---------------------------------------------------------------------------------------------------------


def resized(rank: int, world: int) -> str:
    x = torch.ones(4)
    if rank == 1:
        ringlet.barrier()  # when rank 0 has tried
        ringlet.send(x, 0)
        return "sent"
    work = ringlet.recv(x, 1, async_op=True)
    text = error_of(lambda: x.resize_(1000))
    ringlet.barrier()
    work.wait()
    return text


def unmapped(rank: int, world: int) -> str:
    """Memory that the kernel is to send from, and finds nothing there."""
    x = torch.from_numpy(numpy.frombuffer(mmap.mmap(-1, 4 << 20), dtype=numpy.uint8))

    def protect(access: int) -> None:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.numel()), access)

    if rank == 0:
        protect(0)
    try:
        return error_of(lambda: ringlet.recv(x, 0) if rank else ringlet.send(x, 1))
    finally:
        protect(mmap.PROT_READ | mmap.PROT_WRITE)


def full_heap(pool: Pool) -> list[str]:
    return of_program("ringlet.empty(1 << 30)", env=os.environ | {"RINGLET_HEAP_MIB": "64"})


NEEDS_ROOT = {"two users", "two namespaces", "no interface"}
SAMPLES: dict[str, Callable[[Pool], list[str]]] = {
    "refused": refused,
    "refused by the reducer": refused_by_the_reducer,
    "other counts": lambda pool: of_ranks(pool, other_counts, 2),
    "other collectives": lambda pool: of_ranks(pool, other_collectives, 2),
    "other messages": lambda pool: of_ranks(pool, other_messages, 2),
    "poisoned": lambda pool: with_store(pool, killed_in_a_loop, 3),
    "killed": lambda pool: with_store(pool, killed_in_a_loop, 3),
    "left": lambda pool: of_ranks(pool, leaves_early, 2),
    "interrupted": lambda pool: with_store(pool, is_interrupted, 3),
    "stuck": lambda pool: of_ranks(pool, is_stopped, 4),
    "message against collective": lambda pool: of_ranks(pool, message_against_collective, 2),
    "killed between hosts": lambda pool: between_hosts(pool, True),
    "stuck between hosts": lambda pool: between_hosts(pool, False),
    "store": store_of,
    "disagreeing": disagreeing,
    "variables": wrong_variables,
    "two namespaces": in_two_namespaces,
    "two users": two_users,
    "no interface": without_interface,
    "resized": lambda pool: of_ranks(pool, resized, 2),
    "unmapped": lambda pool: of_ranks(pool, unmapped, 2, join="tcp"),
    "full heap": full_heap,
}
