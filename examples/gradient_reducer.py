"""Trains a small transformer on local ranks with the gradient reducer where DistributedDataParallel would stand.

    python examples/gradient_reducer.py --trace step.json

Prints the loss curve, checks that all ranks end with the same parameters, and tells where the time of a step went.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import ringlet
from char_transformer import CharTransformer, Size, Text, loss_of


def train(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=world)
    text, size = Text(), Size(layers=2, width=64) if options.quick else Size()
    torch.manual_seed(1)
    model = CharTransformer(text.vocabulary, size)
    # from here on every rank holds rank 0's parameters
    reducer = ringlet.GradientReducer(model, bucket_mb=options.bucket_mb, delay=options.delay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    profiler = torch.profiler.profile()

    for step in range(options.steps):
        optimizer.zero_grad()
        with profiler if options.trace and step == options.steps - 1 else nullcontext():
            loss = loss_of(model, *text.batch(size, step, rank))
            loss.backward()  # gradients are averages over the ranks when this returns
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(float(mean))
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {mean:.4f}", flush=True)

    check_same_parameters(model, world)
    if rank == 0:
        print(f"mean loss of the last {len(losses[-20:])} steps: {statistics.fmean(losses[-20:]):.4f}")
        stats = reducer.stats()
        keys = ("backward_s", "communication_s", "exposed_s")
        times = "  ".join(f"{key[:-2]} {1e3 * stats[key]:.2f} ms" for key in keys)
        print(f"the last step: {times}, {len(stats['bucket_bytes'])} buckets")
        if options.trace:
            profiler.export_chrome_trace(str(options.trace))
            print(f"trace of the last step, for https://ui.perfetto.dev: {options.trace}")
    dist.destroy_process_group()


def check_same_parameters(model: torch.nn.Module, world: int) -> None:
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(everyone, flat)
    if not all(torch.equal(other, flat) for other in everyone):
        raise SystemExit("ranks ended with different parameters: a reduction is wrong")


def megabytes_or_measured(text: str) -> float | str:
    return text if text == "measured" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", default="ringlet", help="of torch.distributed")
    parser.add_argument("--bucket-mb", type=megabytes_or_measured, default=1.0, help='MiB, or "measured"')
    parser.add_argument("--delay", type=int, default=0, choices=(0, 1), help="1: gradients of the step before")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--trace", type=Path, help="write a trace of rank 0's last step, as .json")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (options.ranks, options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
