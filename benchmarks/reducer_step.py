"""Step time and exposed communication of the gradient reducer, beside DDP's; merging by measurement beside the default.

    python benchmarks/reducer_step.py --json out/reducer.jsonl --report out/reducer.md
    python benchmarks/reducer_step.py --hosts benchmarks/clusters/2x1-gigabit.toml --report out/reducer-hosts.md

Two comparisons on local ranks, or on emulated hosts. Reducer: the demo's model under the reducer and under DDP on
ringlet, and under DDP on gloo. Merging: three shapes of model with `bucket_mb="measured"` and with the default of
25 MiB. What is compared lives in the same processes and takes turns of a few steps, in another order each time; ratios
are of medians within a turn. A step takes as long as its slowest rank's; exposed is the smaller of the ranks' waits
after their own backwards, because a rank that is early also waits for the other's compute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet
from ringlet.bench.results import circumstances
from ringlet.cli import outputs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.clusters import Cluster, read_cluster
from benchmarks.hosts import Hosts
from benchmarks.page import facts

from char_transformer import CharTransformer, Size, Text, loss_of

TURN_STEPS = 6  # the first of them, with cold caches, is not timed
DECIDED = 26  # reduced backwards after which bucket_mb="measured" has chosen
DEMO_BUCKET_MB = 1.0  # as in the demo: its model has 7 MiB of gradients
Loss = Callable[[nn.Module, int], torch.Tensor]


@dataclass
class Way:
    """One of the compared ways: what it trains, and of each turn the medians over its timed steps, in seconds."""

    name: str
    called: nn.Module
    loss: Loss
    reducer: ringlet.GradientReducer | None = None
    optimizer: torch.optim.Optimizer = field(init=False)
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.called.parameters(), lr=1e-3)

    def turn(self, first: int, group: dist.ProcessGroup) -> None:
        times = [self.step(first + step) for step in range(TURN_STEPS)][1:]
        steps, exposed = (torch.tensor(part, dtype=torch.float64) for part in zip(*times, strict=True))
        dist.all_reduce(steps, dist.ReduceOp.MAX, group)
        dist.all_reduce(exposed, dist.ReduceOp.MIN, group)
        self.step_s.append(statistics.median(steps.tolist()))
        self.exposed_s.append(statistics.median(exposed.tolist()))

    def step(self, number: int) -> tuple[float, float]:
        """Seconds of the step, and of waiting after this rank's own backward."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(self.called, number)
        computed = []

        def at_start_of_backward(_gradient: torch.Tensor) -> None:
            # Callbacks run in the order of queueing when backward is done; the loss's hook is the first of all hooks,
            # so this one runs before the reducer's and before DDP's wait for communication.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: computed.append(time.perf_counter()))

        loss.register_hook(at_start_of_backward)
        loss.backward()
        exposed = time.perf_counter() - computed[0]
        self.optimizer.step()
        return time.perf_counter() - started, exposed


# --- models


def transformer(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    text, size = Text(), Size(layers=2, width=64) if options.quick else Size()
    return CharTransformer(text.vocabulary, size), lambda model, step: loss_of(model, *text.batch(size, step, rank))


def plain_loss(width: int, options: argparse.Namespace, rank: int) -> Loss:
    inputs = torch.randn(options.batch, width, generator=torch.Generator().manual_seed(rank))
    return lambda model, step: model(inputs).square().mean()


def many_tiny_layers(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    layers, width = (20, 16) if options.quick else (400, 64)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), plain_loss(width, options, rank)


def one_huge_layer(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    width = 128 if options.quick else 2048  # 16 MiB, between two small ones
    layers = [nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)]
    return nn.Sequential(*layers), plain_loss(64, options, rank)


MODELS = {"many tiny layers": many_tiny_layers, "one huge layer": one_huge_layer, "transformer": transformer}


# --- comparisons


def of_reducer(rank: int, options: argparse.Namespace, groups: dict[str, dist.ProcessGroup]) -> list[dict[str, Any]]:
    ways = []
    for name, backend in (("reducer", "ringlet"), ("DDP", "ringlet"), ("DDP", "gloo")):
        torch.manual_seed(1)
        model, loss = transformer(options, rank)
        caps = {"bucket_mb": DEMO_BUCKET_MB, "first_bucket_mb": DEMO_BUCKET_MB}
        if name == "DDP":
            called = DistributedDataParallel(model, process_group=groups[backend], bucket_cap_mb=DEMO_BUCKET_MB)
            ways.append(Way(f"{name} on {backend}", called, loss))
        else:
            reducer = ringlet.GradientReducer(model, group=groups[backend], **caps)
            ways.append(Way(f"{name} on {backend}", model, loss, reducer))
    take_turns(ways, options.turns, groups["gloo"], rank)
    return rows("reducer", "transformer", "ringlet", ways)


def of_merging(rank: int, options: argparse.Namespace, groups: dict[str, dist.ProcessGroup]) -> list[dict[str, Any]]:
    found = []
    for backend in options.merging_backends:
        for model_name, make in MODELS.items():
            ways = []
            for name, cap in (("measured", "measured"), ("25 MiB", 25)):
                torch.manual_seed(1)
                model, loss = make(options, rank)
                reducer = ringlet.GradientReducer(model, group=groups[backend], bucket_mb=cap)
                ways.append(Way(name, model, loss, reducer))
            for step in range(DECIDED):
                for way in ways:
                    way.step(step)
            take_turns(ways, options.turns, groups["gloo"], rank)
            found += rows("merging", model_name, backend, ways)
    return found


def take_turns(ways: list[Way], turns: int, group: dist.ProcessGroup, rank: int) -> None:
    for turn in range(turns):
        for place in range(len(ways)):
            ways[(place + turn) % len(ways)].turn(turn * TURN_STEPS, group)
        if rank == 0 and sys.stderr.isatty():
            print(f"\r  turn {turn + 1} of {turns}  ", end="", file=sys.stderr, flush=True)


def rows(comparison: str, model: str, backend: str, ways: list[Way]) -> list[dict[str, Any]]:
    """One row a way. Ratios: how many times as long the way takes as the first one, the median over turns."""
    found = []
    for way in ways:
        row: dict[str, Any] = {"comparison": comparison, "model": model, "backend": backend, "way": way.name}
        row["step_ms"] = 1e3 * statistics.median(way.step_s)
        row["exposed_ms"] = 1e3 * statistics.median(way.exposed_s)
        for key in ("step_s", "exposed_s"):
            pairs = zip(getattr(way, key), getattr(ways[0], key), strict=True)
            row[f"{key[:-2]}_ratio"] = statistics.median(mine / first for mine, first in pairs)
        row["turns"] = len(way.step_s)
        if way.reducer is not None:
            stats = way.reducer.stats()
            row["buckets"], row["merging"] = len(stats["bucket_bytes"]), stats["merging"]
        found.append(row)
    return found


def measure(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # a file of this machine, which its hosts see
    dist.init_process_group("ringlet", store=store, rank=rank, world_size=world)
    groups = {"ringlet": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = of_reducer(rank, options, groups) + of_merging(rank, options, groups)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_on_hosts(cluster: Cluster, folder: str) -> None:
    """This program once more for each rank, on its host."""
    with Hosts(cluster) as hosts:
        ranks = []
        for rank in range(cluster.world):
            command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--folder", folder]
            ranks.append(hosts.start(cluster.host_of(rank), command))
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")


# --- what is shown

COLUMNS = ("model", "backend", "way", "step ms", "exposed ms", "step / first", "exposed / first", "buckets", "kept")
TITLES = {"reducer": "Reducer and DDP, the demo's model", "merging": "Merging by measurement and 25 MiB buckets"}


def cells(row: dict[str, Any]) -> list[str]:
    figures = [f"{row['step_ms']:.2f}", f"{row['exposed_ms']:.3f}", f"{row['step_ratio']:.3f}"]
    kept = (row.get("merging") or {}).get("kept", "")
    words = [row["model"], row["backend"], row["way"]]
    return [*words, *figures, f"{row['exposed_ratio']:.2f}", str(row.get("buckets", "")), kept]


def table(comparison: str, found: list[dict[str, Any]]) -> list[list[str]]:
    return [list(COLUMNS), *(cells(row) for row in found if row["comparison"] == comparison)]


def show(found: list[dict[str, Any]]) -> None:
    for comparison, title in TITLES.items():
        lines = table(comparison, found)
        widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
        print(f"\n{title}\n")
        for line in lines:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def markdown(found: list[dict[str, Any]], meta: dict[str, Any], ranks: Cluster | int) -> str:
    lines = [f"# The gradient reducer on {meta['machine']['name']}, {meta['date'][:10]}", ""]
    lines += ["Written by `benchmarks/reducer_step.py --report`, which says what is measured.", ""]
    lines += facts(meta, ranks=str(ranks))
    for comparison, title in TITLES.items():
        lines += ["", f"## {title}", "", *in_markdown(table(comparison, found), left=3)]
    lines += ["", "## What merging by measurement measured, predicted and kept", "", *in_markdown(told(found), left=2)]
    return "\n".join(lines) + "\n"


def told(found: list[dict[str, Any]]) -> list[list[str]]:
    """Of each measured way alpha and beta, and milliseconds of a backward on both layouts."""
    head = ["model", "backend", "alpha us", "beta ns/KiB"]
    lines = [[*head, "predicted plain", "merged", "measured plain", "merged", "kept"]]
    for row in found:
        merging = row.get("merging") or {}
        if "cost" in merging:
            cost, kept = merging["cost"], str(merging["kept"])
            figures = [f"{1e6 * cost['alpha_s']:.1f}", f"{1e9 * 1024 * cost['beta_s']:.1f}"]
            for times in (merging["predicted_s"], merging.get("measured_s", {})):
                figures += [f"{1e3 * times[name]:.2f}" if times else "the same" for name in ("plain", "merged")]
            lines.append([row["model"], row["backend"], *figures, kept])
    return lines


def in_markdown(lines: list[list[str]], left: int) -> list[str]:
    rule = "|" + "".join("---|" if column < left else "---:|" for column in range(len(lines[0])))
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return [head, rule, *body]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=lambda path: read_cluster(Path(path)), help="emulated, as this file describes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a rank on such a host
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="of the models that are no transformer")
    parser.add_argument("--merging-backends", nargs="+", choices=("ringlet", "gloo"), default=["ringlet", "gloo"])
    parser.add_argument("--json", type=Path, help="a row a line, to this file; circumstances beside it in .meta.json")
    parser.add_argument("--report", type=Path, help="a page in Markdown, to this file")
    parser.add_argument("--quick", action="store_true", help="tiny models, for tests")
    options = parser.parse_args()
    outputs.check({"--json": options.json, "--report": options.report})
    if options.hosts:
        options.ranks = options.hosts.world
    if options.rank is not None:
        return measure(options.rank, options.ranks, options, options.folder)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if options.hosts:
            measure_on_hosts(options.hosts, folder)
        else:
            torch.multiprocessing.spawn(measure, (options.ranks, options, folder), nprocs=options.ranks)
        found = json.loads(Path(folder, "rows.json").read_text())
    meta = circumstances(load)
    show(found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in found))
        options.json.with_suffix(".meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(markdown(found, meta, options.hosts or options.ranks))


if __name__ == "__main__":
    main()
