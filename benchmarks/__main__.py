"""ringlet's commands with what only this repository has: emulated hosts, and more libraries to compare with.

python -m benchmarks bench --peers openmpi,mpich,limit
python -m benchmarks bench --cluster benchmarks/clusters/4x1.toml --algorithm ring,circulant -b 64K -e 16M
python -m benchmarks tune --cluster benchmarks/clusters/4x2-block.toml -o racks
python -m benchmarks reveal openmpi mpich -n 3
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

from benchmarks.clusters import read_cluster
from benchmarks.peers import mpi
from benchmarks.sweep import Jobs, Sweep

from ringlet.bench.cases import MPI_PEERS, PEERS, STREAM
from ringlet.cli import options, reveal
from ringlet.cli.main import main as ringlet_main
from ringlet.cli.main import make_parser
from ringlet.cli.options import Parser


def parsers() -> tuple[Parser, dict[str, Parser]]:
    parser, commands = make_parser()
    for name in ("bench", "tune"):
        commands[name].add_argument("--cluster", type=options.file(".toml"), metavar="FILE",
            help="run on the emulated hosts of a file, as those in benchmarks/clusters/ (needs root)")  # fmt: skip
        commands[name].set_defaults(sweep=Sweep, run=functools.partial(_on_cluster, commands[name].get_default("run")))
    changes = {"bench": ("peers", options.names(PEERS, none=True)), "reveal": ("targets", _target)}
    for name, (option, kind) in changes.items():
        next(action for action in commands[name]._actions if action.dest == option).type = kind
    commands["reveal"].set_defaults(jobs=Jobs)
    return parser, commands


def _on_cluster(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    if args.cluster:
        cluster = read_cluster(args.cluster)
        args.sweep, args.worlds = functools.partial(Sweep, hosts=cluster), args.worlds or (cluster.world,)
    if getattr(args, "peers", ()) is None and args.device in (None, "cpu"):
        there = [peer for peer in mpi.installed() if not (args.cluster and peer == "intelmpi")]
        args.peers = (*([STREAM] if args.cluster else []), "gloo", *there)
    return command(args)


def _target(text: str) -> str:
    return text if text in MPI_PEERS else reveal.target(text)


def main(words: Sequence[str] | None = None) -> int:
    return ringlet_main(words, parsers())


if __name__ == "__main__":
    sys.exit(main())
