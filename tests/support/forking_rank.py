"""One rank of a group, as a program: forks children, each of which ends as programs do, and goes on with its group.

forking_rank.py RANK WORLD STORE TRANSPORT USE
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ringlet
from refusals import refused

CHILD_SECONDS = 20
EPOCHS = int(os.environ.get("RINGLET_TEST_EPOCHS", "2"))


def call_in_child(parent: int) -> None:
    """None of them may move anything."""
    tensor = torch.ones(1000)
    said = rf"belongs to process {parent}; a forked child \(here: process {os.getpid()}\) cannot use it"
    refused(said, ringlet.all_reduce, tensor)
    refused(said, ringlet.all_reduce, tensor, async_op=True)
    refused(said, ringlet.send, tensor, 0)
    refused(said, ringlet.current().abort, "of the child")


def fork_and_go_on() -> None:
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        call_in_child(parent)
        sys.exit(0)
    deadline = time.monotonic() + CHILD_SECONDS
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended, "the child hangs at its end"
    assert status == 0, f"the child ended with status {status}"


def exchange(rank: int, world: int) -> None:
    """Calls that threads of the group's own run."""
    out, into = torch.full((1000,), float(rank)), torch.empty(1000)
    works = [ringlet.send(out, (rank + 1) % world, async_op=True)]
    works.append(ringlet.recv(into, (rank - 1) % world, async_op=True))
    for work in works:
        work.wait()
    assert into.eq((rank - 1) % world).all()
    ringlet.all_reduce(tensor := torch.ones(100_000), async_op=True).wait()
    assert tensor.eq(world).all()


def wait_in_child(world: int) -> None:
    """Of rank 0's calls, which its child must not bring further: that would move them there, and not here."""
    tensor, message = torch.ones(1000), torch.zeros(100_000)
    works = [ringlet.all_reduce(tensor, async_op=True), ringlet.recv(message, 1, async_op=True)]
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        said = rf"was made by process {parent}; a forked child \(here: process {os.getpid()}\) cannot wait for it"
        for work in works:
            refused(said, work.wait, timeout=5)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ringlet.send(torch.ones(1), 1)  # from here on the others come
    for work in works:
        work.wait()
    assert tensor.eq(world).all() and message.eq(1).all()


def come_later(rank: int) -> None:
    if rank == 1:
        ringlet.recv(torch.zeros(1), 0)
        ringlet.send(torch.ones(100_000), 0)
    ringlet.all_reduce(torch.ones(1000))


def fork_beside_calls(rank: int, world: int) -> None:
    """Rank 0 forks one child after the other while another thread of it makes calls."""
    done = threading.Event()

    def call() -> None:
        for _ in range(200):
            exchange(rank, world)
        done.set()

    caller = threading.Thread(target=call)
    caller.start()
    while rank == 0 and caller.is_alive():
        fork_and_go_on()
    caller.join()
    assert done.is_set(), "the calls failed"


def exit_beside_calls(rank: int, world: int) -> None:
    """Rank 0 ends while a thread of it makes calls; the others notice that."""
    under_way = threading.Event()

    def call() -> None:
        try:
            while True:
                exchange(rank, world)
                under_way.set()
        except ringlet.Error:
            under_way.set()

    if rank == 0:
        threading.Thread(target=call, daemon=True).start()
        under_way.wait()
    else:
        call()


def load(rank: int, world: int) -> None:
    """Epochs of a data loader. Its worker processes come and go with each: their SIGCHLD may come in any wait."""
    loader = DataLoader(TensorDataset(torch.full((16,), float(rank))), batch_size=4, num_workers=2)
    for _ in range(EPOCHS):
        for (batch,) in loader:
            ringlet.all_reduce(batch)
            assert batch.eq(sum(range(world))).all()
        ringlet.barrier()


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    path, transport, use = sys.argv[3:]
    torch.set_num_threads(1)
    ringlet.init(rank, world, dist.FileStore(path, world), transport=transport, timeout=30)
    ringlet.all_reduce(torch.ones(1000))
    if use == "loader":
        load(rank, world)
    elif use == "exit beside calls":
        return exit_beside_calls(rank, world)
    elif use == "beside calls":
        fork_beside_calls(rank, world)
    else:
        wait_in_child(world) if rank == 0 else come_later(rank)
    for _ in range(3):
        ringlet.all_reduce(tensor := torch.ones(100_000))
        assert tensor.eq(world).all()
    exchange(rank, world)


if __name__ == "__main__":
    main()
