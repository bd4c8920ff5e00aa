"""gloo alone, without ringlet, aborts a process: `gloo_abort.py` ends with the ranks' exit codes, [-6, -6].

A group of gloo's that one of its own threads is the last to let go of ends on that thread, which then joins itself:
"Resource deadlock avoided", std::terminate, SIGABRT. A callback on a Future runs on such a thread, and holds what its
hook holds: PowerSGD's state and DDP's buckets hold the group. Where DDP has several buckets it is a matter of luck
whether the program's own thread or the last callback lets go last; here the callback does.
"""

import multiprocessing
import tempfile
import threading

import torch
import torch.distributed as dist


def rank_of_two(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group, others_let_go, ran = dist.group.WORLD, threading.Event(), threading.Event()
    assert group is not None

    def last(future: torch.futures.Future, group: dist.ProcessGroup = group) -> None:
        others_let_go.wait()
        ran.set()

    work = group.allreduce([torch.ones(4)])
    future = work.get_future().then(last)
    del work, future, last, group
    dist.destroy_process_group()
    others_let_go.set()
    ran.wait()
    threading.Event().wait(20)  # longer than the thread takes to let go


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_of_two, args=(rank, f"{folder}/store")) for rank in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(60)
        print([one.exitcode for one in ranks])
