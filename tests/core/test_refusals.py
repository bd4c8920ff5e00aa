"""Calls that cannot be right are refused before anything moves, with advice; a group's end leaves nothing behind."""

from __future__ import annotations

import collections
import gc
import math
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import ringlet
import stalls
from kills import only_died
from programs import ended, need_namespace, until
from ranks import on
from refusals import refused
from ringlet import _C
from ringlet import group as groups

ONES = torch.ones(6)

# (call of (rank, world), what the message says); every one of InvalidUsage, with a group of two
REFUSED = [
    (lambda r, w: ringlet.all_reduce(torch.ones(1).expand(4)), "elements of an output tensor share memory"),
    (lambda r, w: ringlet.all_gather(ONES.as_strided((2, 2), (1, 1)), ONES[:2]), "tensor share memory"),
    (
        lambda r, w: ringlet.all_reduce(torch.ones(4, device="meta")),
        "must be in host memory or on a CUDA device, got meta",
    ),
    (lambda r, w: ringlet.all_reduce(torch.eye(3).to_sparse()), "has the layout Sparse: make it dense"),
    (
        lambda r, w: ringlet.all_reduce(torch.nested.nested_tensor([torch.ones(2, 3)]).transpose(1, 2)),
        "is nested and not contiguous: pass .contiguous()",
    ),
    (lambda r, w: ringlet.all_reduce(torch.ones(4, dtype=torch.complex64).conj()), r"pass .resolve_conj"),
    (lambda r, w: ringlet.all_reduce(torch._neg_view(torch.ones(4))), r"pass .resolve_neg"),
    (lambda r, w: ringlet.all_reduce(torch._efficientzerotensor((4,))), "has no memory"),
    (lambda r, w: ringlet.all_reduce(FakeTensorMode().from_tensor(ONES)), "has no memory"),
    (lambda r, w: ringlet.all_reduce(resized(0)), "has no memory"),
    (lambda r, w: ringlet.all_reduce(resized(8, every=2)), "has no memory"),
    (lambda r, w: torch.vmap(ringlet.all_reduce)(torch.ones(3, 4)), "has no memory"),
    (lambda r, w: ringlet.broadcast(torch.ones(4, dtype=torch.complex32)), "does not support dtype ComplexHalf"),
    (lambda r, w: ringlet.all_reduce(torch.ones(4, dtype=torch.uint16)), "sum is not defined for uint16"),
    (lambda r, w: ringlet.reduce(torch.ones(4, dtype=torch.uint64), 0, "bor"), "bor is not defined for uint"),
    (lambda r, w: ringlet.all_reduce([1.0, 2.0]), "a list is neither a torch tensor nor a numpy array"),
    (lambda r, w: ringlet.all_reduce(None), "a NoneType is neither"),
    (lambda r, w: ringlet.all_reduce(numpy.ones(4)[::-1]), r"strides \(-8,\): .*negative"),
    (lambda r, w: ringlet.all_reduce(numpy.ones(4, ">f4")), "array of dtype >f4 has another byte"),
    (lambda r, w: ringlet.all_reduce(numpy.array([None])), "array of dtype object"),
    (lambda r, w: ringlet.all_reduce(numpy.zeros(2, [("a", "f4"), ("b", "i2")])), "array of dtype "),
    (lambda r, w: ringlet.all_reduce(numpy.zeros(2, "i1,i4")["f1"]), "array of dtype int32, strides"),
    (lambda r, w: ringlet.all_reduce(read_only()), "read-only; pass a copy"),
    (lambda r, w: ringlet.all_reduce(numpy.ma.zeros(3)), r"array is masked.*pass array\.filled"),
    (
        lambda r, w: ringlet.all_reduce(ONES, algorithm="rings"),
        'algorithm must be one of auto, ring, butterfly, .*, got "rings"',
    ),
    (
        lambda r, w: ringlet.broadcast(ONES, algorithm="ring"),
        'broadcast: algorithm must be one of auto, tree, .*star.*, got "ring"',
    ),
    (lambda r, w: ringlet.all_reduce(ONES, algorithm=None), "algorithm must be a string"),
    (lambda r, w: ringlet.all_reduce(ONES, "mean"), 'all_reduce: op must be one of sum, avg, product.*, got "mean"'),
    (lambda r, w: ringlet.all_reduce(ONES, 3), "op must be a string"),
    (lambda r, w: ringlet.broadcast(ONES, 2), "broadcast: root must be a rank from 0 to 1, got 2"),
    (lambda r, w: ringlet.broadcast(ONES, 2**32 + 1), "root must be a rank of the group, got 4294967297"),
    (lambda r, w: ringlet.gather(ONES, ONES, "a"), "gather: root must be an integer, got 'a'"),
    (lambda r, w: ringlet.all_reduce(ONES, "premul_sum", scale="x"), "scale must be a number, got 'x'"),
    (
        lambda r, w: ringlet.all_reduce(ONES, group="x"),
        "group must be a ringlet.Group or a group of torch.distributed, not 'x'",
    ),
    (lambda r, w: ringlet.all_reduce(ONES, timeout="x"), "timeout must be seconds above 0 or a timedelta, got 'x'"),
    (lambda r, w: ringlet.recv(ONES, 1 - r, timeout=-math.inf), "timedelta, got -inf"),
    (lambda r, w: ringlet.all_reduce(ONES, timeout=0), "above 0 or a timedelta, got 0"),
    (lambda r, w: ringlet.all_to_all(ONES[:4], ONES[2:]), "all_to_all: output and input must not overlap"),
    (
        lambda r, w: ringlet.all_gather(torch.ones(7), torch.ones(3)),
        "the output tensor must have 6 elements for 2 ranks, got 7",
    ),
    (lambda r, w: ringlet.all_gather(torch.ones(6), torch.ones(3).int()), "must have one dtype, got int32 and float32"),
    (
        lambda r, w: ringlet.reduce_scatter(torch.ones(3), torch.ones(7)),
        "the input tensor must divide into 2 equal blocks, got 7 elements",
    ),
    (lambda r, w: ringlet.all_to_all(torch.ones(7), torch.ones(7)), "must divide into 2 equal blocks, got 7"),
    (lambda r, w: ringlet.all_reduce(ONES, output=torch.ones(5)), "must have 6 elements for 2 ranks, got 5"),
    (lambda r, w: ringlet.gather(None, ONES, r), "gather: output must be a tensor on this rank, got N"),
    (lambda r, w: ringlet.scatter(ONES, None, r), "scatter: input must be a tensor on this rank, got N"),
    (
        lambda r, w: ringlet.send(ONES, r),
        r"send: peer must be a rank from 0 to 1 other than this rank \((\d)\), got \1",
    ),
    (lambda r, w: ringlet.recv(ONES, 5), r"recv: peer must be a rank from 0 to 1 other than this rank \(.\), got 5"),
    (lambda r, w: ringlet.send(ONES, 2**32 + 1 - r), "send: peer must be a rank of the group, got 429496729."),
    (lambda r, w: ringlet.recv(ONES, None), "recv: peer must be an integer, got None"),
    (lambda r, w: ringlet.recv(ONES, numpy.int64(-1)), "recv: peer must be a rank .*, got -1"),
    (lambda r, w: ringlet.send(torch.ones(4, 4).t(), 1 - r), "not contiguous"),
    (lambda r, w: ringlet.init(r, w, dist.HashStore()), "init.. was called before: call ringlet.finalize"),
    (lambda r, w: ringlet.new_group([0, 0]), "must be distinct ranks from 0 to 1"),
    (lambda r, w: ringlet.new_group([0, 2]), "must be distinct"),
    (lambda r, w: ringlet.new_group([0, 2**32 + 1]), "a rank is 4294967297, too large"),
    (lambda r, w: ringlet.new_group(["a"]), "a rank is 'a'; pass a whole number"),
    (lambda r, w: ringlet.new_group(None), "new_group: ranks is None; pass a list"),
    (lambda r, w: ringlet.new_group([0, 1], timeout=0), "above 0 or a timedelta, got 0"),
    (lambda r, w: ringlet.empty(-3), "empty: sizes must be 0 or more, got -3"),
    (lambda r, w: ringlet.empty((1 << 62) + 1), "larger than any memory"),
    (lambda r, w: ringlet.empty(1 << 31, 1 << 31, 2, dtype=torch.float64), "larger than any memory"),
    (lambda r, w: ringlet.empty(1 << 64), "larger than any memory"),
    (lambda r, w: ringlet.empty("a"), "empty: 'str' object cannot be interpreted as an integer"),
    (lambda r, w: ringlet.empty(3, dtype="float32"), "empty: dtype must be a torch.dtype, got 'float32'"),
    (lambda r, w: ringlet.current().close("x"), "close: patience must be seconds .*, got 'x'"),
    (lambda r, w: ringlet.current().close(-1.5), "close: patience must be .*, got -1.5"),
    (lambda r, w: ringlet.empty(3, device="moon"), "empty: "),
]


def read_only() -> numpy.ndarray:
    array = numpy.ones(4)
    array.flags.writeable = False
    return array


def resized(nbytes: int, every: int = 1) -> torch.Tensor:
    tensor = torch.ones(50)[::every]
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@on(2)
def test_what_cannot_be_right_is_refused(rank: int, world: int) -> None:
    wrong = []
    for act, says in REFUSED:
        try:
            refused(says, act, rank, world)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{says}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert ringlet.all_reduce(torch.ones(2)).tolist() == [2, 2], "the group works on, and nobody is out of step"
    with pytest.raises(ValueError, match="op"):  # InvalidUsage is a ValueError and a RuntimeError
        ringlet.all_reduce(ONES, "mean")
    assert ringlet.current().handle.sequence == 1


@on(2, "nothing")
def test_before_and_after_a_group(rank: int, world: int, path: str) -> None:
    for act in (lambda: ringlet.all_reduce(ONES), ringlet.barrier, ringlet.current, lambda: ringlet.new_group([0])):
        refused("no group yet: call ringlet", act)
    ringlet.finalize()  # nothing to leave
    for wrong, says in (
        ({"rank": 2, "world": 2}, "rank 2 of world 2 does not exist"),
        ({"rank": 0, "world": 0}, "rank 0 of world 0 does not exist"),
        ({"rank": 0, "world": 2, "timeout": 0}, "timeout must be seconds above 0 or a timedelta, got 0"),
        ({"rank": "a", "world": 2}, "rank is 'a'; pass a whole number"),
        ({"rank": 0, "world": 2**32 + 2}, "world is 4294967298, too large"),
        ({"rank": 0, "world": 2, "store": object()}, "init: store is a object; pass a torch.distributed store"),
        ({"rank": 0, "world": 2, "name": 3}, "init: name is 3; pass a string"),
        ({"rank": 0, "world": 2, "transport": 3}, 'transport must be one of auto, .*, got "3"'),
        (
            {"rank": 0, "world": 2, "transport": "pigeon"},
            'transport must be one of auto, shared_memory, tcp, threads, got "pigeon"',
        ),
        ({"world": 2}, "rank is not set: pass rank= and world=, or launch with `ringlet run"),
        ({"rank": 0}, "world is not set: pass rank= and world=, or launch with `ringlet run"),
    ):
        refused(says, ringlet.init, **{"store": dist.HashStore(), **wrong})
    refused("store is not set: pass store=, or launch with `ringlet run", ringlet.init, 0, 2)
    group = ringlet.init(rank, world, dist.FileStore(path, world))
    assert ringlet.current() is group and repr(group) == f"<ringlet.Group 'default': rank {rank} of 2, shared_memory>"
    assert not group.handle.failure
    work = ringlet.all_reduce(torch.ones(4), async_op=True)
    ringlet.finalize()
    assert repr(group) == f"<ringlet.Group 'default': rank {rank} of 2, shared_memory, closed>"
    work.wait()
    for act in (lambda: ringlet.all_reduce(ONES, group=group), lambda: ringlet.send(ONES, 1 - rank, group=group)):
        refused("on a group that was closed", act)
    refused("no group yet", ringlet.all_reduce, ONES)
    ringlet.finalize()


def other_new_groups(rank: int, world: int) -> str:
    with pytest.raises(ringlet.Timeout) as caught:
        ringlet.new_group([0, 2] if rank == 0 else [2, 1, 0], timeout=0.3)
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shared_memory", "threads"])
def test_ranks_that_make_other_groups_are_told_so(pool, transport):
    texts = pool.values(other_new_groups, 3, join=transport)
    for text, ranks in zip(texts, ("0, 2", "2, 1, 0", "2, 1, 0"), strict=True):
        assert text.endswith(
            ", or they called new_group with other ranks, or in another order "
            f"(here its ranks are ranks {ranks} of the default group)"
        ), text


def test_a_thread_that_does_not_come_is_named():
    with pytest.raises(ringlet.Timeout, match=r"rank 0: thread\(s\) of rank 1 did not join the group"):
        ringlet.init(0, 2, transport="threads", timeout=0.2, name="incomplete")
    refused("no group yet", ringlet.current)


# --- spawn ----------------------------------------------------------------------------------------------------------


def fails_on_rank_one(rank: int, folder: str) -> None:
    ringlet.barrier()
    if rank == 1:
        raise KeyError("the reason")
    pathlib.Path(folder, f"{rank}").touch()
    ringlet.all_reduce(torch.ones(10))


def fails_first_and_goes_last(rank: int, folder: str, until: str) -> None:
    """Rank 1 fails; the other hears of it and is gone before rank 1 is."""
    others = dist.FileStore(f"{folder}/others", 2)
    ringlet.barrier()
    if rank == 1:
        leave = groups.finalize

        def leave_last() -> None:
            leave()
            others.wait([until])

        groups.finalize = leave_last
        raise KeyError("the reason")
    try:
        ringlet.all_reduce(torch.ones(10))
    finally:
        others.set("gone", "")


def dies_on_rank_one(rank: int, folder: str) -> None:
    ringlet.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    ringlet.all_reduce(torch.ones(10))


def adds(rank: int, folder: str, tensor: torch.Tensor, module: torch.nn.Module, shared: torch.Tensor) -> None:
    total = ringlet.all_reduce(torch.full((3,), rank + 1.0))
    pathlib.Path(folder, f"{rank}").write_text(f"{total.tolist()} {ringlet.current().transport}")
    shared[rank] = 1.0
    if ringlet.current().transport == "shared_memory":  # processes have tensors of their own
        assert ringlet.all_reduce(tensor).tolist() == [2.0] * 3
        assert ringlet.all_reduce(module.weight.data).tolist() == [[2.0]]


@pytest.mark.parametrize("transport", ["shared_memory", "threads"])
def test_spawn_runs_ranks(tmp_path, transport):
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    tensor, shared = torch.ones(3), torch.zeros(2).share_memory_()
    ringlet.spawn(adds, 2, (str(tmp_path), tensor, module, shared), transport=transport)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {str(rank): f"[3.0, 3.0, 3.0] {transport}" for rank in range(2)}
    assert tensor.tolist() == [1.0] * 3 and not tensor.is_shared() and module.weight.item() == 1.0
    assert shared.tolist() == [1.0] * 2


def test_spawn_refuses_what_it_cannot_run():
    for main, ranks, says in (
        (adds, "2", "spawn: nprocs is '2'; pass a whole number"),
        (adds, 0, "nprocs must be from 1 to 1024, got 0"),
        (adds, 1025, "nprocs must be from 1 to 1024, got 1025"),
        (3, 1, "spawn: main is 3; pass a function"),
        (lambda rank: None, 1, r'main or args cannot be pickled .*: pass a function of a module.*transport="threads"'),
    ):
        refused(says, ringlet.spawn, main, ranks, transport="shared_memory")
    refused("cannot be pickled", ringlet.spawn, adds, 1, (threading.Lock(),), transport="shared_memory")


OWN_MAIN = """
import ringlet
def main(rank):
    ringlet.barrier()
if __name__ == "__main__":
    ringlet.spawn(main, 2, timeout=30)
"""


@pytest.mark.parametrize(("arguments", "said"), [(["-"], "the program is no file"), (["-c", OWN_MAIN], "main is of a")])
def test_spawn_refuses_a_program_that_is_no_file(arguments, said):
    run = ended(sys.executable, *arguments, input=OWN_MAIN)
    assert run.stderr.splitlines()[-1].startswith(f"ringlet.errors.InvalidUsage: spawn: {said}"), run.stderr


def test_spawn_says_that_a_program_starts_ranks_when_it_is_imported(tmp_path):
    (tmp_path / "program.py").write_text(OWN_MAIN.replace('if __name__ == "__main__"', "if True"))
    run = ended(sys.executable, tmp_path / "program.py")
    assert run.returncode == 1 and 'put the call to spawn under `if __name__ == "__main__":`' in run.stderr, run.stderr


def test_spawn_with_standard_error_closed_and_a_log(tmp_path):
    (tmp_path / "program.py").write_text(OWN_MAIN)
    command = f"{sys.executable} {tmp_path}/program.py 2>&-"
    environment = os.environ | {"RINGLET_LOG": "debug"}
    assert subprocess.run(["bash", "-c", command], env=environment, timeout=100).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_spawn_without_proc_says_so(tmp_path):
    need_namespace("-m")
    (tmp_path / "program.py").write_text(OWN_MAIN)
    command = f"mount -t tmpfs none /proc; {sys.executable} {tmp_path}/program.py"
    run = ended("unshare", "-m", "bash", "-c", command)
    assert "ringlet.errors.ResourceError: spawn: there is no /proc/self/fd/" in run.stderr


def test_spawn_shows_the_traceback_of_the_rank_that_failed(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as caught:
        ringlet.spawn(fails_on_rank_one, 2, (str(tmp_path),))
    assert "KeyError: 'the reason'" in str(caught.value) and "in fails_on_rank_one" in str(caught.value)
    assert caught.value.error_index == 1
    assert not [child for child in multiprocessing.active_children() if "ForkServer" not in child.name]  # the pool's


def test_spawn_tells_which_rank_died(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL") as caught:
        ringlet.spawn(dies_on_rank_one, 2, (str(tmp_path),))
    assert caught.value.error_index == 1


def test_spawned_threads_show_the_traceback_of_the_rank_that_failed(tmp_path):
    for _ in range(20):
        with pytest.raises(RuntimeError, match=r"rank 1 of 3 .a thread. failed:") as caught:
            ringlet.spawn(fails_on_rank_one, 3, (str(tmp_path),), transport="threads")
        assert "KeyError: 'the reason'" in str(caught.value) and isinstance(caught.value.__cause__, KeyError)


def exits_well(rank, code):
    sys.exit(code)


@pytest.mark.parametrize("code", [None, 0])
def test_a_spawned_rank_may_exit_well(code):
    ringlet.spawn(exits_well, 2, (code,), transport="threads")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        ringlet.spawn(exits_well, 2, (3,), transport="threads")


@pytest.mark.parametrize(("transport", "until"), [("shared_memory", "torch ends it"), ("threads", "gone")])
def test_spawn_shows_the_first_failure_whoever_goes_first(tmp_path, monkeypatch, transport, until):
    monkeypatch.setattr(groups, "finalize", groups.finalize)  # ranks that are threads replace it here
    with pytest.raises(Exception, match="KeyError: 'the reason'"):
        ringlet.spawn(fails_first_and_goes_last, 2, (str(tmp_path), until), transport=transport)


# --- nothing is left behind -----------------------------------------------------------------------------------------


def descriptors() -> list[str]:
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}").split(":")[0])
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(names)


def mappings() -> int:
    return sum("ringlet-heap" in line for line in pathlib.Path("/proc/self/maps").read_text().splitlines())


def wait_until_all_have_left(store: dist.Store, world: int) -> None:
    """A rank that leaves keeps its region, and sees its peers, until they have left; the heap then lets go of it."""
    store.add("left", 1)
    until(lambda: store.add("left", 0) >= world)
    _C.heap()


def come_and_go(rank: int, world: int, folder: str, how: str) -> None:
    """Groups made and left again and again, in good order or not; what the process holds stays as after the first."""
    held, heap = [], []
    for cycle in range(20):
        store = dist.FileStore(f"{folder}/{how}-{cycle}", world)
        if how == "backend":
            dist.init_process_group("ringlet", store=store, rank=rank, world_size=world)
            dist.all_reduce(torch.ones(100_000), async_op=True).wait()
            dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.ones(5), 0)
            dist.destroy_process_group()
        else:
            ringlet.init(rank, world, store)
            ringlet.all_reduce(ringlet.empty(300_000).fill_(1), async_op=True).wait()
            ringlet.all_reduce(torch.ones(300_000))
            part = ringlet.new_group([1, 0])
            work = ringlet.recv(torch.ones(4), 1 - part.rank, group=part, async_op=True)
            ringlet.send(torch.ones(4), 1 - part.rank, group=part)
            work.wait()
            if how == "mismatch":
                with pytest.raises(ringlet.InvalidUsage):
                    ringlet.all_reduce(torch.ones(50_000 + rank), timeout=20)
            ringlet.finalize()
            del part, work
        wait_until_all_have_left(store, world)
        del store
        if cycle in (1, 19):
            gc.collect()
            held.append(collections.Counter(descriptors()))
            held[-1]["heap mappings"] = mappings()
            held[-1]["Python threads"] = threading.active_count()
            held[-1]["threads"] = len(os.listdir("/proc/self/task"))
            heap.append(_C.heap()["allocated_bytes"])
    # Less is no leak: what an earlier test of this process left behind may end in between.
    assert not held[1] - held[0], f"18 cycles left {dict(held[1] - held[0])} behind"
    assert heap[1] - heap[0] < 16 << 20, heap  # a group keeps its control page, for peers that look late


@pytest.mark.parametrize("how", ["good order", "mismatch", "backend"])
def test_groups_leave_nothing_in_the_process(pool, tmp_path, how):
    pool.values(come_and_go, 2, str(tmp_path), how, join="nothing")


@on(2)
def test_dropped_handles_let_their_tensors_go(rank: int, world: int) -> None:
    """Work handles and tensors dropped at once live until their call is done, and no longer."""
    before = _C.heap()["allocated_bytes"]
    for _ in range(30):
        ringlet.all_reduce(ringlet.empty(200_000).fill_(1), async_op=True)
    ringlet.all_reduce(torch.ones(1))
    ringlet.barrier(async_op=True).wait()
    gc.collect()
    assert (_C.heap()["allocated_bytes"] - before) == 0


def ringlet_sockets() -> set[str]:
    """The names that groups meet at."""
    return set(re.findall(r"@ringlet-[0-9a-f]{32}", pathlib.Path("/proc/net/unix").read_text()))


def killed_while_meeting(rank: int, world: int, store: str) -> None:
    """One more rank never comes. Rank 1 is killed before its time is over."""
    if rank == 1:
        stalls.later(0.3, os.kill, os.getpid(), signal.SIGKILL)
    with pytest.raises((ringlet.Timeout, ringlet.PeerLost)):
        limit = timedelta(seconds=60 if rank == 1 else 2)
        _C.Group.join(dist.FileStore(store, 3), "gone", rank, 3, limit, "shared_memory")


def test_nothing_is_left_on_the_machine(pool, tmp_path):
    """After groups that ended well, that failed, and processes that were killed, in use and while meeting."""
    sockets = ringlet_sockets()
    only_died(pool.run(killed_while_meeting, 2, str(tmp_path / "store"), join="nothing"), 1)
    only_died(pool.run(die_in_use, 3), 1)
    pool.values(come_and_go, 2, str(tmp_path), "mismatch", join="nothing")
    left, end = ringlet_sockets() - sockets, time.monotonic() + 30
    while left and time.monotonic() < end:  # other tests' groups meet meanwhile, and are soon done
        time.sleep(0.1)
        left &= ringlet_sockets()
    assert not left


def die_in_use(rank: int, world: int) -> None:
    ringlet.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(ringlet.PeerLost):
        ringlet.all_reduce(torch.ones(10))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(ringlet.DeviceError, match=r"torch has no cuda:3 here: run `ringlet doctor`"):
        ringlet.empty(4, device="cuda:3")
    refused("no registered memory on meta", ringlet.empty, 4, device="meta")
