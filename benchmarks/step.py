"""What communication costs a training step, for each way to train: overhead over the same step without communication.

    python -m benchmarks.step --models demo tiny gpt --json out/step.jsonl --report out/step.md

All ways live in the same processes and take turns of a few steps, each time another one first; `none` is the same model
that every rank trains by itself. A turn's step takes as long as its slowest rank's; its processor time is the mean over
ranks, and counts all threads. Overheads are differences within a turn, and their medians over turns are shown. Zero and
FSDP2 also spread the optimizer's work over the ranks, which can make their overhead negative. Ways of libraries that
are not installed (DeepSpeed) are left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import page
from benchmarks.local_ranks import on_ranks
from examples.char_transformer import CharTransformer, Size, Text, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet

TURN_STEPS = 4  # the first of them, with cold caches, is not timed
Loss = Callable[[nn.Module, int], torch.Tensor]
Step = Callable[[int], None]
Timed = Callable[[int], tuple[float, float]]

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
class Way:
    """A way to train. timed: makes the step of a number, and gives two of its figures on this rank. turns: of each turn
    the medians over steps of both figures, each over the ranks by its operation."""

    timed: Timed
    over_ranks: tuple[dist.ReduceOp, dist.ReduceOp]
    turns: list[list[float]] = field(default_factory=list)

    def turn(self, number: int, group: dist.ProcessGroup) -> None:
        found = [self.timed(number * TURN_STEPS + place) for place in range(TURN_STEPS)]
        figures = torch.tensor(found[1:], dtype=torch.float64).T.contiguous()
        for of_steps, op in zip(figures, self.over_ranks, strict=True):
            dist.all_reduce(of_steps, op, group)
        self.turns.append(figures.median(1).values.tolist())


def by_clocks(step: Step, group: dist.ProcessGroup) -> Way:
    """In seconds: the slowest rank's time, and the mean of the ranks' processor time."""

    def timed(number: int) -> tuple[float, float]:
        dist.barrier(group)
        began, used = time.perf_counter(), time.process_time()
        step(number)
        return time.perf_counter() - began, (time.process_time() - used) / dist.get_world_size(group)

    return Way(timed, (dist.ReduceOp.MAX, dist.ReduceOp.SUM))


def take_turns(ways: Sequence[Way], turns: int, group: dist.ProcessGroup, what: str) -> None:
    """Each time another way first. A turn that warms up comes before, and does not count."""
    for turn in range(-1, turns):
        for place in range(len(ways)):
            ways[(place + turn) % len(ways)].turn(turn + 1, group)
        if dist.get_rank() == 0 and sys.stderr.isatty():
            print(f"\r  {what}: turn {turn + 1} of {turns}  ", end="", file=sys.stderr, flush=True)
    for way in ways:
        del way.turns[0]


def measure(rank: int, world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    groups = {"ringlet": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = []
    for name in options.models:
        bucket_mb, make = MODELS[name]

        def fresh(make: Callable[[int], tuple[nn.Module, Loss]] = make) -> tuple[nn.Module, Loss]:
            torch.manual_seed(1)
            return make(rank)

        setting = Setting(fresh, bucket_mb, groups)
        ways = {way: by_clocks(WAYS[way](setting), groups["gloo"]) for way in options.ways}
        take_turns(list(ways.values()), options.turns, groups["gloo"], name)
        parameters = sum(parameter.numel() for parameter in fresh()[0].parameters())
        found += [row(name, parameters, way, ways) for way in ways]
    return found


def row(model: str, parameters: int, way: str, ways: dict[str, Way]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model, "parameters": parameters, "way": way}
    figures = (zip(*ways[name].turns, strict=True) for name in (way, "none"))
    for name, mine, alone in zip(("step", "processor"), *figures, strict=True):
        over = sorted(a - b for a, b in zip(mine, alone, strict=True))
        found[f"{name}_ms"] = 1e3 * statistics.median(mine)
        found[f"{name}_over_ms"] = 1e3 * statistics.median(over)
        found[f"{name}_over_quartiles_ms"] = [1e3 * over[len(over) // 4], 1e3 * over[-1 - len(over) // 4]]
    return found | {"turns": len(ways[way].turns)}


def tables(rows: list[dict[str, Any]]) -> list[str]:
    head = ("way", "step ms", "over none ms", "its quartiles", "processor ms", "over none ms")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        cells = []
        for row in mine:
            low, high = row["step_over_quartiles_ms"]
            times = [f"{row[key]:.2f}" for key in ("step_ms", "step_over_ms", "processor_ms", "processor_over_ms")]
            cells.append([row["way"], *times[:2], f"{low:.2f} to {high:.2f}", *times[2:]])
        lines += [f"{model}, {mine[0]['parameters']:,} parameters", "", *page.markdown_table(head, cells, left=1), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo", "tiny", "wide", "gpt"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = page.parse(parser)
    wanted = dict.fromkeys(["none", *options.ways])
    options.ways = [way for way in wanted if installed(way)]
    rows = on_ranks(measure, options.ranks, options)
    lines = tables(rows)
    if absent := [way for way in wanted if way not in options.ways]:
        lines.append(f"Left out, because their library is not installed: {', '.join(absent)}.")
    print("\n" + "\n".join(lines))
    page.write(options, "step", f"What communication costs a training step of {options.ranks} ranks", lines, rows)


if __name__ == "__main__":
    main()
