"""Step time and exposed communication of the gradient reducer, beside DDP's; merging by measurement beside the default.

    python -m benchmarks.reducer_step --json out/reducer.jsonl --report out/reducer.md
    python -m benchmarks.reducer_step --hosts benchmarks/clusters/2x1-gigabit.toml --report out/reducer-hosts.md

Two comparisons on local ranks, or on emulated hosts. Reducer: the demo's model under the reducer and under DDP on
ringlet, and under DDP on gloo. Merging: three shapes of model with `bucket_mb="measured"` and with the default of
25 MiB. What is compared lives in the same processes and takes turns of a few steps, in another order each time; ratios
are of medians within a turn. A step takes as long as its slowest rank's; exposed is the smaller of the ranks' waits
after their own backwards, because a rank that is early also waits for the other's compute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import local_ranks, page
from benchmarks.clusters import Cluster, read_cluster
from benchmarks.hosts import Hosts
from benchmarks.step import Loss, Timed, Way, layers, take_turns, transformer
from examples.char_transformer import Size
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet

DECIDED = 26  # reduced backwards after which bucket_mb="measured" has chosen
DEMO_BUCKET_MB = 1.0  # as in the demo: its model has 7 MiB of gradients
# Of a step's time, and of the wait.
OVER_RANKS = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)


def timed(called: nn.Module, loss_of: Loss) -> Timed:
    """Makes a step: its seconds, and those of waiting after this rank's own backward."""
    optimizer = torch.optim.SGD(called.parameters(), lr=1e-3)

    def make_step(number: int) -> tuple[float, float]:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(called, number)
        computed = []

        def at_start_of_backward(_gradient: torch.Tensor) -> None:
            # Callbacks run in the order of queueing when backward is done; the loss's hook is the first of all hooks,
            # so this one runs before the reducer's and before DDP's wait for communication.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: computed.append(time.perf_counter()))

        loss.register_hook(at_start_of_backward)
        loss.backward()
        exposed = time.perf_counter() - computed[0]
        optimizer.step()
        return time.perf_counter() - started, exposed

    return make_step


# --- models


def language(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    return transformer(rank, Size(layers=2, width=64) if options.quick else Size())


def many_tiny_layers(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    widths = [16] * 21 if options.quick else [64] * 401
    return layers(rank, *widths, batch=options.batch)


def one_huge_layer(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Loss]:
    width = 128 if options.quick else 2048  # 16 MiB, between two small ones
    return layers(rank, 64, width, width, 64, batch=options.batch)


MODELS = {"many tiny layers": many_tiny_layers, "one huge layer": one_huge_layer, "transformer": language}


# --- comparisons


def of_reducer(rank: int, options: argparse.Namespace, groups: dict[str, dist.ProcessGroup]) -> list[dict[str, Any]]:
    ways, reducers = {}, {}
    for name, backend in (("reducer", "ringlet"), ("DDP", "ringlet"), ("DDP", "gloo")):
        torch.manual_seed(1)
        called, loss = language(options, rank)
        if name == "DDP":
            called = DistributedDataParallel(called, process_group=groups[backend], bucket_cap_mb=DEMO_BUCKET_MB)
        else:
            caps = {"bucket_mb": DEMO_BUCKET_MB, "first_bucket_mb": DEMO_BUCKET_MB}
            reducers[f"{name} on {backend}"] = ringlet.GradientReducer(called, group=groups[backend], **caps)
        ways[f"{name} on {backend}"] = Way(timed(called, loss), OVER_RANKS)
    take_turns(list(ways.values()), options.turns, groups["gloo"], "reducer")
    return rows({"comparison": "reducer", "model": "transformer", "backend": "ringlet"}, ways, reducers)


def of_merging(rank: int, options: argparse.Namespace, groups: dict[str, dist.ProcessGroup]) -> list[dict[str, Any]]:
    found = []
    for backend in options.merging_backends:
        for model_name, make in MODELS.items():
            ways, reducers = {}, {}
            for name, cap in (("measured", "measured"), ("25 MiB", 25)):
                torch.manual_seed(1)
                model, loss = make(options, rank)
                reducers[name] = ringlet.GradientReducer(model, group=groups[backend], bucket_mb=cap)
                ways[name] = Way(timed(model, loss), OVER_RANKS)
            for step in range(DECIDED):
                for way in ways.values():
                    way.timed(step)
            take_turns(list(ways.values()), options.turns, groups["gloo"], model_name)
            found += rows({"comparison": "merging", "model": model_name, "backend": backend}, ways, reducers)
    return found


def rows(
    about: dict[str, str], ways: dict[str, Way], reducers: dict[str, ringlet.GradientReducer]
) -> list[dict[str, Any]]:
    """One row a way. Ratios: how many times as long the way takes as the first one, the median over turns."""
    found, first = [], next(iter(ways.values()))
    for name, way in ways.items():
        row: dict[str, Any] = {**about, "way": name, "turns": len(way.turns)}
        columns = (zip(*one.turns, strict=True) for one in (way, first))
        for key, mine, firsts in zip(("step", "exposed"), *columns, strict=True):
            row[f"{key}_ms"] = 1e3 * statistics.median(mine)
            row[f"{key}_ratio"] = statistics.median(a / b for a, b in zip(mine, firsts, strict=True))
        if name in reducers:
            stats = reducers[name].stats()
            row["buckets"], row["merging"] = len(stats["bucket_bytes"]), stats["merging"]
        found.append(row)
    return found


def measure(rank: int, world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    groups = {"ringlet": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    return of_reducer(rank, options, groups) + of_merging(rank, options, groups)


def on_hosts(cluster: Cluster) -> list[dict[str, Any]]:
    """What `measure` returns on rank 0; this program runs once more for each rank, on its host."""
    with tempfile.TemporaryDirectory() as folder, Hosts(cluster) as hosts:
        ranks = []
        for rank in range(cluster.world):
            words = [*sys.argv[1:], "--rank", str(rank), "--folder", folder]
            command = [sys.executable, "-m", "benchmarks.reducer_step", *words]
            ranks.append(hosts.start(cluster.host_of(rank), command))
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
        return local_ranks.result(folder)


# --- what is shown

COLUMNS = ("model", "backend", "way", "step ms", "exposed ms", "step / first", "exposed / first", "buckets", "kept")
TITLES = {"reducer": "Reducer and DDP, the demo's model", "merging": "Merging by measurement and 25 MiB buckets"}


def cells(row: dict[str, Any]) -> list[str]:
    figures = [f"{row['step_ms']:.2f}", f"{row['exposed_ms']:.3f}", f"{row['step_ratio']:.3f}"]
    kept = (row.get("merging") or {}).get("kept", "")
    words = [row["model"], row["backend"], row["way"]]
    return [*words, *figures, f"{row['exposed_ratio']:.2f}", str(row.get("buckets", "")), kept]


def tables(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for comparison, title in TITLES.items():
        mine = [cells(row) for row in found if row["comparison"] == comparison]
        lines += [f"## {title}", "", *page.markdown_table(COLUMNS, mine, left=3), ""]
    return [*lines, "## What merging by measurement measured, predicted and kept", "", *told(found)]


def told(found: list[dict[str, Any]]) -> list[str]:
    """Of each measured way alpha and beta, and milliseconds of a backward on both layouts."""
    lines = []
    for row in found:
        merging = row.get("merging") or {}
        if "cost" in merging:
            cost, kept = merging["cost"], str(merging["kept"])
            figures = [f"{1e6 * cost['alpha_s']:.1f}", f"{1e9 * 1024 * cost['beta_s']:.1f}"]
            for times in (merging["predicted_s"], merging.get("measured_s", {})):
                figures += [f"{1e3 * times[name]:.2f}" if times else "the same" for name in ("plain", "merged")]
            lines.append([row["model"], row["backend"], *figures, kept])
    head = (
        "model",
        "backend",
        "alpha us",
        "beta ns/KiB",
        "predicted plain",
        "merged",
        "measured plain",
        "merged",
        "kept",
    )
    return page.markdown_table(head, lines, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=lambda path: read_cluster(Path(path)), help="emulated, as this file describes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a rank on such a host
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="of the models that are no transformer")
    parser.add_argument("--merging-backends", nargs="+", choices=("ringlet", "gloo"), default=["ringlet", "gloo"])
    parser.add_argument("--quick", action="store_true", help="tiny models, for tests")
    options = page.parse(parser)
    if options.rank is not None:
        return local_ranks.act(options.rank, options.hosts.world, options.folder, measure, (options,), "ringlet")
    found = on_hosts(options.hosts) if options.hosts else local_ranks.on_ranks(measure, options.ranks, options)
    lines = tables(found)
    print("\n".join(lines))
    ranks = str(options.hosts or options.ranks)
    page.write(options, "reducer", "The gradient reducer", lines, found, ranks=ranks)


if __name__ == "__main__":
    main()
