"""Gradient merge: k micro-batches a step, one reduction for all of them, and a short last window at an epoch's end.

    python examples/gradient_merge.py -k 4

Trains the same model twice, with k micro-batches and with one batch k times larger, and compares the parameters.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

import ringlet
from char_transformer import CharTransformer, Size, Text, loss_of

Batch = tuple[torch.Tensor, torch.Tensor]
SAME = 1e-9  # float64; sums are taken in other orders


def merged(model: torch.nn.Module, epochs: list[list[Batch]], k: int) -> int:
    """Trains on micro-batches, `k` a step. Returns the number of reductions."""
    reducer = ringlet.GradientReducer(model)
    merge = reducer.accumulate(k)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in epochs:
        for inputs, targets in batches:
            loss_of(model, inputs, targets).backward()
            if merge.complete:
                optimizer.step()
                optimizer.zero_grad()
        if merge.finish():  # what is left of the epoch, divided by its own number of micro-batches
            optimizer.step()
            optimizer.zero_grad()
    return reducer.stats()["backwards"]


def large(model: torch.nn.Module, epochs: list[list[Batch]], k: int) -> None:
    """Trains on the same data in batches that are k times larger."""
    ringlet.GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in epochs:
        for window in windows(batches, k):
            inputs, targets = (torch.cat(part) for part in zip(*window, strict=True))
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()


def windows(batches: list[Batch], k: int) -> Iterator[list[Batch]]:
    for first in range(0, len(batches), k):
        yield batches[first : first + k]


def train(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=world)
    text, size = Text(), Size(layers=2, width=64, batch=4)
    length = options.micro_batches
    epochs = [[text.batch(size, epoch * length + i, rank) for i in range(length)] for epoch in range(2)]
    torch.manual_seed(1)
    ours = CharTransformer(text.vocabulary, size).double()
    theirs = CharTransformer(text.vocabulary, size).double()
    theirs.load_state_dict(ours.state_dict())

    reductions = merged(ours, epochs, options.k)
    large(theirs, epochs, options.k)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    if rank == 0:
        print(f"{2 * length} micro-batches, {options.k} a step: {reductions} reductions")
        print(f"largest difference from batches {options.k} times larger: {difference:.1e}")
    dist.destroy_process_group()
    if difference > SAME:
        raise SystemExit("gradient merge and the larger batch ended apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--micro-batches", type=int, default=10, help="in an epoch of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="ringlet", help="of torch.distributed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (options.ranks, options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
