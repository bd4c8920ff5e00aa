#!/usr/bin/env python3
"""All-reduce of CUDA tensors: ringlet's algorithms over NCCL's sends against NCCL's own, the same ranks, in one run.

    benchmarks/gpu.py [--nproc 2] [--sizes 1M,64M,256M] [--rounds 5]

Ranks are processes, on GPU (rank modulo the number of GPUs); where several share one, the figures are of a loopback.
Times are of CUDA events, the slowest rank's, medians over rounds; "ratio" is NCCL's time over ringlet's,
median of pairs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

import ringlet

CALLS = 20
ALGORITHMS = ("ring", "two_shot", "halving_doubling", "auto")


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, on the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    ringlet.barrier()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return ringlet.all_reduce(torch.tensor([begin.elapsed_time(end) / CALLS]), "max").item()


def main(rank: int, world: int, store: str, sizes: list[int], rounds: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for bytes_ in sizes:
        tensor = torch.zeros(bytes_ // 4, device="cuda")
        calls: dict[str, Callable[[], object]] = {"nccl": lambda tensor=tensor: dist.all_reduce(tensor)}
        for name in ALGORITHMS:
            calls[name] = lambda tensor=tensor, name=name: ringlet.all_reduce(tensor, algorithm=name)
        times = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(rounds)]
        for name in calls if rank == 0 else ():
            time = statistics.median(one[name] for one in times)
            ratio = statistics.median(one["nccl"] / one[name] for one in times)
            print(f"{bytes_:>12} B  {name:<18} {time:10.3f} ms  ratio {ratio:.2f}", flush=True)
    dist.destroy_process_group()


def bytes_of(text: str) -> int:
    return int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--sizes", default="1M,64M,256M")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = [bytes_of(size) for size in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        ringlet.spawn(main, options.nproc, (options.nproc, f"{folder}/store", sizes, options.rounds))
