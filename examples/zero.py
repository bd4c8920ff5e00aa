#!/usr/bin/env python3
"""Trains a small transformer with its states divided over local ranks, at each ZeRO stage, and compares.

    python examples/zero.py --ranks 2 --steps 60
    python examples/zero.py --settings ds_config.json      one run, with a DeepSpeed file's settings

Prints the loss curve and what a rank holds and sends, and saves and loads a checkpoint on the way.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ringlet
from char_transformer import CharTransformer, Size, Text, loss_of
from ringlet import settings

LR = 2e-3


def make_zero(text: Text, size: Size, arguments: dict) -> ringlet.Zero:
    torch.manual_seed(1)
    return ringlet.Zero(CharTransformer(text.vocabulary, size), torch.optim.AdamW, **arguments, lr=LR)


def train(zero: ringlet.Zero, text: Text, size: Size, updates: range) -> list[float]:
    """The mean loss over ranks of each update, in nats per character."""
    losses = []
    micro_batches = zero.options.accumulate
    for update in updates:
        total = torch.zeros(())
        for micro in range(micro_batches):
            loss = loss_of(zero.module, *text.batch(size, update * micro_batches + micro, dist.get_rank()))
            loss.backward()
            zero.step()
            total += loss.detach().float() / micro_batches
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def run(name: str, arguments: dict, options: argparse.Namespace, folder: str) -> dict:
    """Trains half the steps, saves, and trains the other half in another Zero that has loaded the checkpoint."""
    text, size = Text(), Size(layers=2, width=64) if options.quick else Size()
    half = options.steps // 2
    zero = make_zero(text, size, arguments)
    losses = train(zero, text, size, range(half))
    dcp.save({"zero": zero}, checkpoint_id=f"{folder}/{name}")
    stats = zero.stats()
    zero.remove()
    del zero
    second = make_zero(text, size, arguments)
    dcp.load({"zero": second}, checkpoint_id=f"{folder}/{name}")
    losses += train(second, text, size, range(half, options.steps))
    parameters = sum(p.numel() for p in second.module.parameters())
    return {"losses": losses, "parameters": parameters, "steps": half, **stats}


def train_rank(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=world)
    if options.settings:
        runs = {options.settings.name: settings.from_deepspeed(options.settings).zero()}
    else:
        runs = {f"stage {stage}": {"stage": stage, "dtype": torch.bfloat16} for stage in (1, 2, 3)}
    results = {name: run(name, arguments, options, folder) for name, arguments in runs.items()}
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def show(results: dict[str, dict]) -> None:
    kinds = ("parameters", "gradients", "master", "optimizer", "total")
    print(
        f"{'':<12}{'first loss':>11}{'last loss':>11}" + "".join(f"{kind:>12}" for kind in kinds) + f"{'sent/step':>12}"
    )
    for name, result in results.items():
        count = result["parameters"]
        held = "".join(f"{result['memory'][kind] / count:>12.2f}" for kind in kinds)
        sent = result["communication"]["sent_bytes"] / max(1, result["steps"]) / count
        print(f"{name:<12}{result['losses'][0]:>12.4f}{result['losses'][-1]:>12.4f}{held}{sent:>12.2f}")
    print("held and sent by a rank: bytes per parameter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="updates of each run; half before the checkpoint")
    parser.add_argument("--settings", type=Path, help="a DeepSpeed JSON file, instead of the three stages in bfloat16")
    parser.add_argument("--backend", default="ringlet", help="of torch.distributed")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_rank, (options.ranks, options, folder), nprocs=options.ranks)
        results = json.loads(Path(folder, "results.json").read_text())
    show(results)


if __name__ == "__main__":
    main()
