"""What communication costs a training step, for each way to train: overhead over the same step without communication.

    python benchmarks/step.py --models demo tiny gpt --json out/step.jsonl

All ways live in the same processes and take turns of a few steps, each time another one first; `none` is the same model
that every rank trains by itself. A turn's step takes as long as its slowest rank's; its processor time is the mean over
ranks, and counts all threads. Overheads are differences within a turn, and their medians over turns are shown. Zero and
FSDP2 also spread the optimizer's work over the ranks, which can make their overhead negative. Ways of libraries that
are not installed (DeepSpeed) are left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet
from ringlet.bench.results import circumstances

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from char_transformer import CharTransformer, Size, Text, loss_of

TURN_STEPS = 4  # the first of them, with cold caches, is not timed
Loss = Callable[[nn.Module, int], torch.Tensor]
Step = Callable[[int], None]

# --- models


def transformer(rank: int, size: Size) -> tuple[nn.Module, Loss]:
    text = Text()
    return CharTransformer(text.vocabulary, size), lambda model, step: loss_of(model, *text.batch(size, step, rank))


def layers(rank: int, *widths: int, batch: int = 32) -> tuple[nn.Module, Loss]:
    inputs = torch.randn(batch, widths[0], generator=torch.Generator().manual_seed(rank))
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
    return model, lambda called, _step: called(inputs).square().mean()


# With the size of DDP's and the reducer's buckets in MiB: about an eighth of the gradients, at most the default.
MODELS: dict[str, tuple[float, Callable[[int], tuple[nn.Module, Loss]]]] = {
    "demo": (1, lambda rank: transformer(rank, Size())),
    "tiny": (1, lambda rank: layers(rank, *[64] * 241)),
    "wide": (25, lambda rank: layers(rank, 64, 2048, 2048, 64)),
    "gpt": (25, lambda rank: transformer(rank, Size(width=512, layers=9, heads=8, context=64, batch=4))),
    "quick": (1, lambda rank: layers(rank, *[16] * 8)),  # for tests
}

# --- ways to train


@dataclass
class Setting:
    """Of one rank: a fresh copy of the model comes from `make`, the same for all ways."""

    make: Callable[[], tuple[nn.Module, Loss]]
    bucket_mb: float
    groups: dict[str, dist.ProcessGroup]


def stepping(called: nn.Module, loss: Loss, reduce: Callable[[], None] = lambda: None) -> Step:
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-4, foreach=True)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(called, number).backward()
        reduce()
        optimizer.step()

    return step


def none(setting: Setting) -> Step:
    return stepping(*setting.make())


def naive(setting: Setting) -> Step:
    model, loss = setting.make()
    parameters = list(model.parameters())

    def reduce() -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, setting.groups["ringlet"])

    return stepping(model, loss, reduce)


def ddp(backend: str) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        model, loss = setting.make()
        group = setting.groups[backend]
        return stepping(DistributedDataParallel(model, process_group=group, bucket_cap_mb=setting.bucket_mb), loss)

    return make


def reducer(in_place: bool) -> Callable[[Setting], Step]:
    """in_place: as the reducer chooses; else all gradients are copied into buckets, as between more than two ranks."""

    def make(setting: Setting) -> Step:
        model, loss = setting.make()
        made = ringlet.GradientReducer(model, bucket_mb=setting.bucket_mb, first_bucket_mb=min(1, setting.bucket_mb))
        if not in_place:
            made._channel.in_place = lambda device: False
        return stepping(model, loss)

    return make


def zero(stage: int) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        model, loss = setting.make()
        engine = ringlet.Zero(model, torch.optim.AdamW, stage=stage, lr=1e-4)

        def step(number: int) -> None:
            loss(model, number).backward()
            engine.step()
            engine.zero_grad()

        return step

    return make


def fsdp2(reshard: bool) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, loss = setting.make()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return stepping(model, loss)

    return make


def deepspeed(stage: int) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        import deepspeed as library

        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # a launcher of its own would set it

        model, loss = setting.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": int(setting.bucket_mb * (1 << 18))},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

        def step(number: int) -> None:
            engine.backward(loss(engine, number))
            engine.step()

        return step

    return make


WAYS: dict[str, Callable[[Setting], Step]] = {
    "none": none,
    "naive": naive,
    "ddp-gloo": ddp("gloo"),
    "ddp-ringlet": ddp("ringlet"),
    "reducer": reducer(in_place=True),
    "reducer-copies": reducer(in_place=False),
    **{f"zero-{stage}": zero(stage) for stage in (1, 2, 3)},
    "fsdp2-2": fsdp2(reshard=False),  # parameters stay gathered from forward to backward, as in ZeRO 2
    "fsdp2-3": fsdp2(reshard=True),
    **{f"deepspeed-{stage}": deepspeed(stage) for stage in (1, 2, 3)},
}


def installed(way: str) -> bool:
    return not way.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


# --- measurement


@dataclass
class Measured:
    step: Step
    wall_s: list[float] = field(default_factory=list)  # by turn
    processor_s: list[float] = field(default_factory=list)

    def turn(self, number: int, group: dist.ProcessGroup) -> None:
        wall, processor = [], []
        for place in range(TURN_STEPS):
            dist.barrier(group)
            began, used = time.perf_counter(), time.process_time()
            self.step(number * TURN_STEPS + place)
            wall.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        slowest, spent = torch.tensor(wall[1:]).double(), torch.tensor(processor[1:]).double()
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        dist.all_reduce(spent, dist.ReduceOp.SUM, group)
        self.wall_s.append(slowest.median().item())
        self.processor_s.append(spent.median().item() / dist.get_world_size(group))


def measure_rank(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("ringlet", store=store, rank=rank, world_size=world)
    groups = {"ringlet": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = []
    for name in options.models:
        bucket_mb, make = MODELS[name]

        def fresh(make: Callable[[int], tuple[nn.Module, Loss]] = make) -> tuple[nn.Module, Loss]:
            torch.manual_seed(1)
            return make(rank)

        setting = Setting(fresh, bucket_mb, groups)
        ways = {way: Measured(WAYS[way](setting)) for way in options.ways}
        order = list(ways)
        for turn in range(-1, options.turns):  # the first one is warming up
            for place in range(len(order)):
                ways[order[(place + turn) % len(order)]].turn(turn + 1, groups["gloo"])
            if rank == 0 and sys.stderr.isatty():
                print(f"\r  {name}: turn {turn + 1} of {options.turns}  ", end="", file=sys.stderr, flush=True)
        parameters = sum(parameter.numel() for parameter in fresh()[0].parameters())
        found += [row(name, parameters, way, ways) for way in order]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def row(model: str, parameters: int, way: str, ways: dict[str, Measured]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model, "parameters": parameters, "way": way}
    for key, name in (("wall_s", "step"), ("processor_s", "processor")):
        mine, alone = getattr(ways[way], key)[1:], getattr(ways["none"], key)[1:]
        over = sorted(a - b for a, b in zip(mine, alone, strict=True))
        found[f"{name}_ms"] = 1e3 * statistics.median(mine)
        found[f"{name}_over_ms"] = 1e3 * statistics.median(over)
        found[f"{name}_over_quartiles_ms"] = [1e3 * over[len(over) // 4], 1e3 * over[-1 - len(over) // 4]]
    return found | {"turns": len(ways[way].wall_s) - 1}


def show(rows: list[dict[str, Any]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        print(f"\n{model}, {mine[0]['parameters']:,} parameters\n")
        print("| way | step ms | over none ms | its quartiles | processor ms | over none ms |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for row in mine:
            low, high = row["step_over_quartiles_ms"]
            print(
                f"| {row['way']} | {row['step_ms']:.2f} | {row['step_over_ms']:.2f} | {low:.2f} to {high:.2f} "
                f"| {row['processor_ms']:.2f} | {row['processor_over_ms']:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo", "tiny", "wide", "gpt"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, help="a row a line, to this file; circumstances beside it in .meta.json")
    options = parser.parse_args()
    options.ways = list(dict.fromkeys(["none", *options.ways]))
    absent = [way for way in options.ways if not installed(way)]
    options.ways = [way for way in options.ways if way not in absent]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure_rank, (options.ranks, options, folder), nprocs=options.ranks)
        rows = json.loads(Path(folder, "rows.json").read_text())
    show(rows)
    if absent:
        print(f"\nleft out, because their library is not installed: {', '.join(absent)}")
    if options.json:
        load_free = circumstances(0.0)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options.json.with_suffix(".meta.json").write_text(json.dumps(load_free, indent=2) + "\n")


if __name__ == "__main__":
    main()
