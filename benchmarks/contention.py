"""Measures which all-reduces crowd the uplinks of hosts with several ranks, beside what their schedules predict.

    python -m benchmarks.contention [--size 4M] [--rounds 3] [--json FILE] [--report FILE.md] [--plot FILE.svg]

On emulated hosts (docs/decisions/0015), with ranks numbered host after host (block) and round robin (cyclic), first
with schedules along the ranks' own order (RINGLET_TOPOLOGY=ignore), then along the topology. "predicted" is the load of
the busiest uplink in units of the buffer (ringlet.schedule.cost). "measured": the time of the all-reduce in times of
a plain TCP stream's for as many bytes over the same link in the same round: the median of paired ratios. "counted" is
what the busiest uplink's interface counted, headers included, in units of the buffer.
The claim: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.clusters import Cluster, read_cluster
from benchmarks.sweep import Sweep
from benchmarks.uplinks import stream_times

import ringlet
from ringlet.bench.run import Outcome, run
from ringlet.cli import outputs
from ringlet.cli.options import size
from ringlet.schedule.cost import uplink_load

CLUSTERS = ("4x2-block", "4x2-cyclic", "2x4-block", "2x4-cyclic")
ALGORITHMS = ("ring", "butterfly", "halving_doubling", "halving_doubling_far", "circulant", "hierarchical")
HEAD = ("cluster", "order", "algorithm", "predicted", "measured", "off by", "counted")


def predicted(algorithm: str, cluster: Cluster, ordered: bool) -> float:
    hosts = [cluster.host_of(rank) for rank in range(cluster.world)]
    made = ringlet.schedule(algorithm, world=cluster.world, hosts=hosts if ordered else None)
    return float(uplink_load(made, hosts))


def measure(name: str, ordered: bool, options: argparse.Namespace) -> tuple[list[dict[str, Any]], Outcome]:
    cluster = read_cluster(Path(__file__).with_name("clusters") / f"{name}.toml")
    algorithms = ALGORITHMS if ordered else ALGORITHMS[:-1]  # hierarchical knows no other order
    os.environ["RINGLET_TOPOLOGY"] = "" if ordered else "ignore"
    sweep = Sweep(
        worlds=(cluster.world,), hosts=cluster, algorithms=algorithms, memory=("ordinary",), peers=("stream",),
        begin_bytes=options.size, end_bytes=options.size, rounds=options.rounds, iterations=2, warmup=1,
    )  # fmt: skip
    outcome = run(sweep)
    times = {config.algorithm: ratio for (_, config), ratio in stream_times(outcome.rows).items()}
    counted = {
        algorithm: statistics.median(row["uplink_bytes"] for row in outcome.rows if row["algorithm"] == algorithm)
        for algorithm in algorithms
    }
    rows = [
        {
            "cluster": name,
            "order": "topology" if ordered else "ranks",
            "algorithm": algorithm,
            "predicted": predicted(algorithm, cluster, ordered),
            "measured": times[algorithm],
            "counted": counted[algorithm] / options.size,
        }
        for algorithm in algorithms
    ]
    return rows, outcome


def cells(row: dict[str, Any]) -> list[str]:
    figures = [f"{row[key]:.2f}" for key in ("predicted", "measured")]
    off = f"{100 * (row['measured'] / row['predicted'] - 1):+.0f} %"
    return [row["cluster"], row["order"], row["algorithm"], *figures, off, f"{row['counted']:.2f}"]


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib.pyplot as plt

    panels = [(cluster, order) for order in ("ranks", "topology") for cluster in CLUSTERS]
    figure, axes = plt.subplots(2, len(CLUSTERS), figsize=(13, 6), sharey=True, layout="constrained")
    for axis, (cluster, order) in zip(axes.flat, panels, strict=True):
        shown = [row for row in rows if (row["cluster"], row["order"]) == (cluster, order)]
        places = range(len(shown))
        axis.bar(places, [row["measured"] for row in shown], color="#4878a8", label="measured")
        axis.plot(places, [row["predicted"] for row in shown], "D", color="#c44e52", label="predicted")
        axis.set_xticks(places, [row["algorithm"] for row in shown], rotation=40, ha="right", fontsize=8)
        axis.set_title(f"{cluster}, along the {order}", fontsize=10)
    axes[0, 0].legend()
    figure.supylabel("busiest uplink, in buffers")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size, default="4M", help="of the buffer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = page.parse(parser)
    outputs.check({"--plot": options.plot})
    rows, outcome = [], Outcome()
    for ordered in (False, True):
        for name in CLUSTERS:
            found, outcome = measure(name, ordered, options)
            rows += found
            for row in found:
                print("  ".join(f"{cell:<20}" for cell in cells(row)), flush=True)
    if options.plot:
        draw(rows, options.plot)
    lines = page.markdown_table(HEAD, map(cells, rows), left=3)
    page.write(options, "contention", "Contention on uplinks of 200 Mbit/s", lines, rows, outcome)


if __name__ == "__main__":
    main()
