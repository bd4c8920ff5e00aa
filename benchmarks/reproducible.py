"""What reproducible=True promises, and what it costs: digests of weights by the number of ranks, and times of steps.

    python -m benchmarks.reproducible --json out/reproducible.jsonl --report out/reproducible.md

Digests: every way trains two models for 100 steps of 8 micro-batches, which the ranks share, in one world after the
other. "4, then 2": half of the steps on 4 ranks, and the others on 2, from the state that those left. All numbers of
ranks must give one digest with reproducible=True.

Cost: a step of 8 micro-batches with reproducible=True beside one of plain accumulation, in the same processes, which
take turns. A ratio is the median of the turns' ratios; a turn's step takes as long as its slowest rank's, and its
processor time is the mean over ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks import page
from benchmarks.local_ranks import on_ranks
from benchmarks.step import by_clocks, take_turns
from examples.char_transformer import CharTransformer, Size, Text, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet

WINDOW = 8  # micro-batches of a step
WORLDS = (8, 4, 2, 1)  # 4 ranks leave a state, from which 2 go on
Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of the model, the step and the micro-batch's number
Made = tuple[nn.Module, Loss]

# --- models


def transformer(size: Size) -> Callable[[], Made]:
    def make() -> Made:
        text = Text()
        torch.manual_seed(1)
        model = CharTransformer(text.vocabulary, size)
        return model, lambda called, step, number: loss_of(called, *text.batch(size, step, number))

    return make


def convolutions() -> Made:
    """With batch norms that are frozen, as where a trained body is tuned."""
    torch.manual_seed(2)
    channels, layers = (3, 16, 32), []
    for inner, outer in pairwise(channels):
        norm = nn.BatchNorm2d(outer)
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 2)
        layers += [nn.Conv2d(inner, outer, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))
    for child in model:
        child.train(not isinstance(child, nn.BatchNorm2d))

    def loss(called: nn.Module, step: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + number)
        inputs = torch.randn(4, 3, 16, 16, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        return nn.functional.cross_entropy(called(inputs), labels)

    return model, loss


# The digests' models: the demo's with two windows of text a micro-batch, which makes a step as large as the demo's.
LEARNING = {"demo": transformer(Size(batch=2)), "frozen batch norm": convolutions}
# The cost's, with the size of the reducer's buckets in MiB.
COSTING = {
    "demo": (1.0, transformer(Size())),
    "gpt": (25.0, transformer(Size(width=512, layers=9, heads=8, context=64, batch=1))),
}
QUICK = {"demo": transformer(Size(width=32, layers=1, context=16, batch=2)), "frozen batch norm": convolutions}

# --- ways to train


@dataclass
class Trainer:
    """`step` trains on this rank's micro-batches of a step; `state` is what another world goes on from."""

    model: nn.Module
    step: Callable[[int], None]
    save: Callable[[Path], None] = lambda folder: None
    load: Callable[[Path], None] = lambda folder: None
    whole: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def by_reducer(made: Made, group: dist.ProcessGroup, bucket_mb: float, reproducible: bool) -> Trainer:
    model, loss = made
    reducer = ringlet.GradientReducer(
        model, group=group, bucket_mb=bucket_mb, first_bucket_mb=min(1, bucket_mb), reproducible=reproducible
    )
    k = WINDOW // dist.get_world_size(group)
    window = reducer.accumulate(k)
    optimizer = optimizer_of(model, 1e-3)

    def step(number: int) -> None:
        for micro_batch in window.micro_batches:
            loss(model, number, micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(folder: Path) -> None:
        if dist.get_rank(group) == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], folder / "reducer")

    def load(folder: Path) -> None:
        of_model, of_optimizer = torch.load(folder / "reducer")
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)

    return Trainer(model, step, save, load)


def by_zero(made: Made, group: dist.ProcessGroup, stage: int, reproducible: bool) -> Trainer:
    model, loss = made
    k = WINDOW // dist.get_world_size(group)
    zero = ringlet.Zero(model, torch.optim.AdamW, stage, group=group, accumulate=k, lr=1e-3, reproducible=reproducible)

    def step(number: int) -> None:
        for micro_batch in zero.micro_batches:
            loss(model, number, micro_batch).backward()
            zero.step()

    def save(folder: Path) -> None:
        dcp.save({"zero": zero}, checkpoint_id=folder / f"zero-{stage}", process_group=group)

    def load(folder: Path) -> None:
        dcp.load({"zero": zero}, checkpoint_id=folder / f"zero-{stage}", process_group=group)

    return Trainer(model, step, save, load, zero.gathered)


def by_ddp(made: Made, group: dist.ProcessGroup) -> Trainer:
    model, loss = made
    called = DistributedDataParallel(model, process_group=group)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    optimizer = optimizer_of(model, 1e-3)

    def step(number: int) -> None:
        mine = range(rank * WINDOW // world, (rank + 1) * WINDOW // world)
        for micro_batch in mine:
            with called.no_sync() if micro_batch != mine[-1] else contextlib.nullcontext():
                (loss(called, number, micro_batch) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, step)


# --- digests: way, over what, and how it trains
Make = Callable[[Made, dist.ProcessGroup], Trainer]
REPRODUCIBLE: list[tuple[str, str, Make]] = [
    (name, over, make)
    for over in ("shared memory", "TCP")
    for name, make in (
        ("GradientReducer", lambda made, group: by_reducer(made, group, 1.0, True)),
        *((f"Zero stage {s}", lambda made, group, s=s: by_zero(made, group, s, True)) for s in (1, 3)),
    )
]
OTHERS: list[tuple[str, str, Make]] = [
    ("GradientReducer, not reproducible", "shared memory", lambda made, group: by_reducer(made, group, 1.0, False)),
    ("DDP", "gloo", by_ddp),
]


def digest_of(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:12]


def all_digests(
    rank: int, world: int, options: argparse.Namespace, groups: dict[str, dist.ProcessGroup], folder: Path
) -> Iterable[dict[str, Any]]:
    for model_name, make_model in (QUICK if options.quick else LEARNING).items():
        for way, over, make in REPRODUCIBLE + OTHERS:
            here = folder / f"{model_name} {way} {over}"
            whole, half = range(options.steps), options.steps // 2
            said = {"model": model_name, "way": way, "over": over, "reproducible": (way, over, make) in REPRODUCIBLE}
            runs = [(str(world), whole)]
            if world == 2 and said["reproducible"]:
                runs.append(("4, then 2", range(half, options.steps)))
            for ranks, steps in runs:
                trainer = make(make_model(), groups[over])
                if steps.start:
                    trainer.load(here)
                for step in steps:
                    trainer.step(step)
                    if world == 4 and said["reproducible"] and step == half - 1:
                        here.mkdir(exist_ok=True)
                        trainer.save(here)
                        dist.barrier(groups["gloo"])
                with trainer.whole():
                    mine = digest_of(trainer.model)
                everyones: list[Any] = [None] * world
                dist.all_gather_object(everyones, mine, group=groups["gloo"])
                if rank == 0:
                    print(f"{model_name}, {way} on {over}, ranks {ranks}: {mine}", flush=True)
                yield said | {"ranks": ranks, "steps": options.steps, "digests": sorted(set(everyones))}


# --- cost


def all_costs(
    rank: int, world: int, options: argparse.Namespace, groups: dict[str, dist.ProcessGroup]
) -> Iterable[dict[str, Any]]:
    models = {"demo": (1.0, QUICK["demo"])} if options.quick else COSTING
    for model_name, (bucket_mb, make_model) in models.items():
        pairs = {
            "GradientReducer": lambda yes, cap=bucket_mb, make=make_model: by_reducer(
                make(), groups["shared memory"], cap, yes
            ),
            "Zero stage 1": lambda yes, make=make_model: by_zero(make(), groups["shared memory"], 1, yes),
        }
        trainers = {(way, yes): make(yes) for way, make in pairs.items() for yes in (False, True)}
        ways = {key: by_clocks(trainer.step, groups["gloo"]) for key, trainer in trainers.items()}
        take_turns(list(ways.values()), options.turns, groups["gloo"], model_name)
        for way in pairs:
            row: dict[str, Any] = {"model": model_name, "way": way, "ranks": world, "turns": options.turns}
            row["parameters"] = sum(p.numel() for p in trainers[way, True].model.parameters())
            times = (zip(*ways[way, yes].turns, strict=True) for yes in (False, True))
            for key, plain, reproducible in zip(("wall_s", "processor_s"), *times, strict=True):
                ratios = sorted(b / a for a, b in zip(plain, reproducible, strict=True))
                row[key] = [statistics.median(plain), statistics.median(reproducible)]
                row[f"{key}_ratio"] = statistics.median(ratios)
                row[f"{key}_quartiles"] = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
            if rank == 0:
                print(f"{model_name}, {way}, {world} ranks: {row['wall_s_ratio']:.3f} times as long", flush=True)
            yield row


# --- ranks, and what is shown


def measure(rank: int, world: int, options: argparse.Namespace, folder: str) -> dict[str, list[dict[str, Any]]]:
    groups = {"gloo": dist.group.WORLD}
    for name, transport in (("shared memory", "shared_memory"), ("TCP", "tcp")):
        groups[name] = dist.new_group(backend="ringlet", pg_options=ringlet.BackendOptions(transport=transport))
    found: dict[str, list[dict[str, Any]]] = {"digests": [], "costs": []}
    if "digests" in options.parts:
        found["digests"] = list(all_digests(rank, world, options, groups, Path(folder)))
    if "costs" in options.parts and world in (2, 4):
        found["costs"] = list(all_costs(rank, world, options, groups))
    return found


def table_of_digests(rows: list[dict[str, Any]]) -> list[str]:
    """A line a model and way, a column a number of ranks."""
    columns = ["1", "2", "4", "8", "4, then 2"]
    head = ["1 rank", *(f"{ranks} ranks" for ranks in columns[1:4]), columns[4]]
    lines = []
    for key in dict.fromkeys((row["model"], row["way"], row["over"]) for row in rows):
        mine = {row["ranks"]: row["digests"] for row in rows if (row["model"], row["way"], row["over"]) == key}
        cells = [" ".join(mine[ranks]) if ranks in mine else "" for ranks in columns]
        same = len({digest for digests in mine.values() for digest in digests}) == 1
        lines.append([*key, *cells, "yes" if same else "no"])
    return page.markdown_table(["model", "way", "over", *head, "same bits"], lines, left=9)


def table_of_costs(rows: list[dict[str, Any]]) -> list[str]:
    head = ["model", "parameters", "way", "ranks", "plain ms", "step ms", "ratio", "its quartiles", "processor time"]
    lines = []
    for row in rows:
        low, high = row["wall_s_quartiles"]
        times = [f"{1e3 * seconds:.0f}" for seconds in row["wall_s"]]
        ratios = [f"{row['wall_s_ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{row['processor_s_ratio']:.3f}"]
        lines.append([row["model"], f"{row['parameters']:,}", row["way"], row["ranks"], *times, *ratios])
    return page.markdown_table(head, lines, left=3)


def tables(digests: list[dict[str, Any]], costs: list[dict[str, Any]]) -> list[str]:
    lines = []
    if digests:
        title = f"## Digests of the weights after {digests[0]['steps']} steps of {WINDOW} micro-batches"
        lines += [title, "", *table_of_digests(digests), ""]
    if costs:
        lines += ["## A step with reproducible=True, beside plain accumulation", "", *table_of_costs(costs)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("digests", "costs"), default=["digests", "costs"])
    parser.add_argument("--steps", type=int, default=100, help="of the digests")
    parser.add_argument("--turns", type=int, default=12, help="of the costs")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for tests")
    options = page.parse(parser)
    found: dict[str, list[dict[str, Any]]] = {"digests": [], "costs": []}
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS if "digests" in options.parts else (4, 2):
            for part, rows in on_ranks(measure, world, options, folder, backend="gloo").items():
                found[part] += rows
    lines = tables(**found)
    print("\n".join(lines))
    page.write(options, "reproducible", "Reproducible training", lines, [*found["digests"], *found["costs"]])
    for model in dict.fromkeys(row["model"] for row in found["digests"]):
        mine = [row for row in found["digests"] if row["model"] == model]
        if len({digest for row in mine if row["reproducible"] for digest in row["digests"]}) != 1:
            print(f"{model}: reproducible=True gives several digests", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
