"""Trains one small transformer in five ways on local ranks, and compares what communication costs in each.

    python examples/demo.py            (or: make demo)

All models live in the same processes and take turns, a few steps each, so that a machine that drifts drifts for all. A
sixth model trains without any communication, on each rank by itself: what a step costs more than that model's step at
the same place is the mode's overhead. Exposed communication is measured the same way in all modes: from the end of this
rank's own backward, when autograd has nothing left to compute, until every averaged gradient is ready. Of each step the
smaller of the ranks' values counts: a rank that is early also waits for the other's compute, the last one to arrive
waits for communication alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet
from char_transformer import CharTransformer, Size, Text, loss_of
from demo_report import Findings, draw_picture, print_modes, print_sizes

MODES = {
    "ddp_gloo": "DDP on gloo",
    "ddp": "DDP on ringlet",
    "reducer": "GradientReducer",
    "ring": "GradientReducer, ring",
    "butterfly": "GradientReducer, butterfly",
}
ALONE = "alone"  # the same step without communication
BUCKET_MB = 1.0  # the model has 7 MiB of gradients
TURN_STEPS = 5
SAME_CURVE = 1e-3  # nats; the modes may add up in different orders


@dataclass
class Trainer:
    """One mode: its model, and per step the loss, the seconds it took and the seconds spent only waiting."""

    step_model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(self.step_model, inputs, targets)
        computed = []

        def at_start_of_backward(_gradient: torch.Tensor) -> None:
            # Callbacks run in the order of queueing when backward is done; the loss's hook is the first of all hooks,
            # so this one runs before the reducer's and before DDP's wait for communication.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: computed.append(time.perf_counter()))

        loss.register_hook(at_start_of_backward)
        loss.backward()
        self.exposed_s.append(time.perf_counter() - computed[0])
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - started)
        self.losses.append(loss.item())


def make_trainer(mode: str, vocabulary: int, size: Size, groups: dict[str, dist.ProcessGroup]) -> Trainer:
    torch.manual_seed(1)
    model = CharTransformer(vocabulary, size)
    parameters = list(model.parameters())
    step_model: nn.Module = model
    group = groups["gloo" if mode == "ddp_gloo" else "own"]
    if mode in ("ddp_gloo", "ddp"):
        step_model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    elif mode != ALONE:
        named = mode != "reducer" and dist.get_backend(group) == "ringlet"
        ringlet.GradientReducer(
            model, group=group, bucket_mb=BUCKET_MB, first_bucket_mb=BUCKET_MB, algorithm=mode if named else None
        )
    return Trainer(step_model, parameters, torch.optim.AdamW(parameters, lr=2e-3))


def train_rank(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    """One rank: all modes in turns. Rank 0 shows progress and writes what was measured to `folder`/modes.json."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=world)
    groups = {"own": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    text, size = Text(), Size(layers=2, width=64) if options.quick else Size()
    order = [*MODES, ALONE]
    trainers = {mode: make_trainer(mode, text.vocabulary, size, groups) for mode in order}
    if rank == 0:
        count = sum(p.numel() for p in trainers[ALONE].parameters)
        print(
            f"{count:,} parameters, {len(text.indices):,} characters, {world} ranks, {options.steps} steps", flush=True
        )
    with Progress(len(order) * options.steps, shown=rank == 0) as progress:
        for turn, first in enumerate(range(0, options.steps, TURN_STEPS)):
            steps = range(first, min(first + TURN_STEPS, options.steps))
            # another mode first in each turn; the same on all ranks
            for mode in order[turn % len(order) :] + order[: turn % len(order)]:
                for step in steps:
                    trainers[mode].step(*text.batch(size, step, rank))
                progress.advance(len(steps), f"step {steps[-1] + 1}: loss {trainers[mode].losses[-1]:.3f} ({mode})")
    mine = {mode: (t.losses, t.step_s, t.exposed_s) for mode, t in trainers.items()}
    everyone = [None] * world
    dist.all_gather_object(everyone, mine, group=groups["gloo"])
    if rank == 0:
        Path(folder, "modes.json").write_text(json.dumps(summary(everyone)))
    dist.destroy_process_group()


def summary(ranks: list[dict[str, tuple[list[float], list[float], list[float]]]]) -> dict[str, dict]:
    """Each mode's losses averaged over ranks, and its medians over steps in ms: `step_ms`, `overhead_ms` (the step less
    the step without communication in the same place) and `exposed_ms`.

    A turn's first step, with cold caches, is not timed.
    """
    steps = len(ranks[0][ALONE][1])
    timed = [step for step in range(steps) if step % TURN_STEPS] or [0]

    def slowest(mode: str, step: int) -> float:
        return max(rank[mode][1][step] for rank in ranks)

    return {
        mode: {
            "losses": [statistics.fmean(values) for values in zip(*(rank[mode][0] for rank in ranks), strict=True)],
            "step_ms": 1e3 * statistics.median(slowest(mode, i) for i in timed),
            "overhead_ms": 1e3 * statistics.median(slowest(mode, i) - slowest(ALONE, i) for i in timed),
            "exposed_ms": 1e3 * statistics.median(min(rank[mode][2][i] for rank in ranks) for i in timed),
        }
        for mode in (*MODES, ALONE)
    }


class Progress:
    """A bar on a terminal, a line every ten seconds elsewhere, nothing where not `shown`."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.shown, self.done, self.bar = total, shown, 0, None
        self.said = time.monotonic()

    def __enter__(self) -> Progress:
        if self.shown and sys.stdout.isatty():
            from rich import progress

            columns = (progress.BarColumn(), progress.TimeRemainingColumn(), progress.TextColumn("{task.description}"))
            self.bar = progress.Progress(*columns)
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.total)
        return self

    def advance(self, by: int, text: str) -> None:
        self.done += by
        if self.bar:
            self.bar.update(self.task, advance=by, description=text)
        elif self.shown and time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            print(f"  {100 * self.done // self.total:3d} %  {text}", flush=True)

    def __exit__(self, *_exception: object) -> None:
        if self.bar:
            self.bar.stop()


def train(options: argparse.Namespace) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_rank, (options.ranks, options, folder), nprocs=options.ranks)
        return json.loads(Path(folder, "modes.json").read_text())


def measure_sizes(options: argparse.Namespace) -> list[dict]:
    """One row of `ringlet bench` for each library, algorithm, size and round."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "sizes.json")
        command = [
            sys.executable,
            "-m",
            "ringlet",
            "bench",
            "--nproc",
            str(options.ranks),
            "--collective",
            "all_reduce",
        ]
        command += ["--algorithms", "ring,butterfly", "--memory", "registered", "--via", "api", "--peers", "gloo"]
        command += ["-b", "4", "-f", "16", "--json", str(rows)]
        command += ["-e", "64K", "--rounds", "1", "--ms", "5"] if options.quick else ["-e", "64M"]
        print("$ ringlet", *command[3:], flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # it prints a table of its own; ours is below
        return [json.loads(line) for line in rows.read_text().splitlines()]


def check_same_curve(modes: dict[str, dict]) -> float:
    """The largest difference in loss at any step between any mode and the first, in nats."""
    first = next(iter(modes.values()))["losses"]
    worst = max(abs(a - b) for mode in MODES for a, b in zip(modes[mode]["losses"], first, strict=True))
    if worst > SAME_CURVE:
        raise SystemExit(f"the modes' loss curves differ by {worst:.2g} nats: a reduction is wrong")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each mode (default 160)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 10 steps and few sizes, for tests")
    parser.add_argument(
        "--backend", default="ringlet", help="of the first four modes; any but ringlet: no table of sizes"
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"))
    options = parser.parse_args()
    options.steps = options.steps or (10 if options.quick else 160)
    started = time.monotonic()

    modes = train(options)
    worst = check_same_curve(modes)
    print_modes(modes, MODES, ALONE)
    print(f"same curve in all modes: they differ by at most {worst:.1g} nats at any step\n")
    sizes = measure_sizes(options) if options.backend == "ringlet" else []
    if sizes:
        print_sizes(sizes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(options.out, Findings(modes, MODES, sizes, options.ranks, ALONE))
    print(f"picture: {options.out}   ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
