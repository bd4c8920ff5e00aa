"""The command line of `ringlet bench`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from . import peers, report, results
from .cases import DEVICES, MPI_PEERS, NCCL, PEERS, STREAM, Sweep, format_bytes, parse_bytes
from .clusters import read_cluster, read_toml
from .errors import BenchError
from .hosts import why_not
from .plot import plot
from .ranks.case import CALLS, ITEM_BYTES, MEMORIES
from .ranks.data import OPS
from .run import Row, Watcher, run

_EPILOG = """\
examples:
  ringlet bench --algorithms ring,butterfly,two_shot -e 16M
  ringlet bench --sweep main --json out/main.jsonl --plot out/main.svg --report benchmarks/results/
  ringlet bench --nproc 4,8 -b 64K --peers openmpi,mpich,intelmpi
  ringlet bench --hosts 4x1 --algorithms ring,circulant -b 64K -e 16M
  ringlet bench --from out/main.jsonl --plot out/main.png      draw again, measure nothing

Libraries are measured in turns, size by size, for --rounds rounds, and compared within a round.
Sizes are those of nccl-tests: the largest buffer that a rank passes. GB/s are 10^9 bytes.
"""


def add_parsers(subparsers: Any) -> None:
    """Add `bench` to the parsers of `python -m ringlet`; its `run` default is `bench_command`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure collectives against gloo and the MPIs",
        description="Measure a collective over message sizes, against gloo and the MPIs, interleaved in one run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=bench_command)
    _add_what(parser)
    _add_how(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to measure").add_argument
    add("--sweep", metavar="NAME", help="options from benchmarks/sweeps/NAME.toml, or a file; flags override them")
    add("--hosts", metavar="NAME",
        help="run on the emulated hosts of benchmarks/clusters/NAME.toml, or a file (needs root)")  # fmt: skip
    add("--device", choices=DEVICES, help="where buffers are (default cpu); cuda: compared with NCCL")
    add("--transport", metavar="T", help="ringlet's transport (default: its own choice)")
    add("--nproc", dest="worlds", type=comma_list(int), metavar="N[,N]", help="ranks (default 2)")
    add("--collective", dest="collectives", type=comma_list(str), metavar="C,C",
        help=f"{', '.join(CALLS)} (default all_reduce)")  # fmt: skip
    add("--algorithms", type=comma_list(str), metavar="A,B", help="ringlet's (default auto; none: only the peers)")
    add("-b", dest="begin_bytes", type=parse_bytes, metavar="BYTES", help="smallest size (default 4)")
    add("-e", dest="end_bytes", type=parse_bytes, metavar="BYTES", help="largest size (default 256M)")
    add("-f", dest="factor", type=int, metavar="F", help="from a size to the next (default 4)")
    add("--memory", type=comma_list(str), metavar="M,M",
        help=f"{', '.join(MEMORIES)}: of ringlet.use_registered_allocator() (default registered,ordinary)")  # fmt: skip
    add("--via", type=comma_list(str), metavar="V,V",
        help="api, torch: through ringlet's interface or torch.distributed")  # fmt: skip
    add("--peers", type=comma_list(str), metavar="P,P",
        help=f"{', '.join(PEERS)}, or none; default: gloo and what `make peers` has installed")  # fmt: skip
    add("--dtype", choices=tuple(ITEM_BYTES), help="default float32")
    add("--op", choices=OPS, help="default sum")


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how").add_argument
    add("-n", dest="iterations", type=int, metavar="N", help="timed calls a measurement (default 0: fill --ms)")
    add("--ms", dest="sample_ms", type=float, metavar="MS", help="length of a measurement (default 50)")
    add("-w", dest="warmup", type=int, metavar="N", help="warm-up calls a measurement (default 5; 2 from 16 MiB)")
    add("-c", dest="check", type=_switch, metavar="0|1", nargs="?", const=True, help="check results (default 1)")
    add("--rounds", type=int, metavar="R", help="repetitions of everything, interleaved (default 5)")
    add("--timeout", dest="timeout_s", type=float, metavar="S", help="longest wait for any answer (default 120)")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write one object a line, and FILE's .meta.json beside it")
    add("--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over size (.svg, .png)")
    add("--report", type=Path, metavar="FILE", help="write a results page in Markdown; a folder: DATE-MACHINE.md in it")
    add("--from", dest="source", type=Path, metavar="FILE", help="show an earlier --json, measure nothing")


def bench_command(args: argparse.Namespace) -> int:
    """Run it. 0: done; 1: wrong elements, or a rank died; 2: cannot run as asked; 130: interrupted."""
    try:
        sweep = None if args.source else build_sweep(args)
        if sweep:
            peers.require(sweep.peers)
            require_hosts(sweep)
            require_device(sweep)
    except BenchError as error:
        print(f"ringlet bench: {error}", file=sys.stderr)
        return 2
    try:
        rows, meta = measure(sweep, args.json) if sweep else results.read(args.source)
        report.show(rows, meta)
        if args.plot:
            args.plot.parent.mkdir(parents=True, exist_ok=True)
            plot(rows, args.plot)
        if args.report:
            _write_report(args.report, rows, meta)
    except BenchError as error:
        print(f"ringlet bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ringlet bench: interrupted", file=sys.stderr)
        return 130
    return 1 if results.wrong_elements(rows) else 0


def require_hosts(sweep: Sweep) -> None:
    """BenchError where the sweep is on emulated hosts, and there can be none here."""
    reason = why_not() if sweep.hosts else None
    if reason:
        raise BenchError(reason)


def require_device(sweep: Sweep) -> None:
    """BenchError where the sweep is on GPUs, and torch sees none."""
    if sweep.device != "cpu" and not getattr(torch, sweep.device).is_available():
        raise BenchError(f"device: torch {torch.__version__} sees no {sweep.device} here (ringlet doctor says more)")


def build_sweep(args: argparse.Namespace) -> Sweep:
    """Defaults, then the sweep file, then flags."""
    names = {one.name for one in dataclasses.fields(Sweep)}
    chosen = _read_sweep(args.sweep, names) if args.sweep else {}
    chosen |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "hosts" in chosen:
        chosen["hosts"] = read_cluster(named_file("clusters", chosen["hosts"]))
        chosen["worlds"] = args.worlds or (chosen["hosts"].world,)
    if chosen.get("device", "cpu") != "cpu":
        chosen = {"peers": (NCCL,), "memory": ("ordinary",)} | chosen
    if "peers" not in chosen:
        able = [peer for peer in MPI_PEERS if "hosts" not in chosen or peer != "intelmpi"]
        there = [peer for peer in able if peer in peers.installed()]
        chosen["peers"] = (*([STREAM] if "hosts" in chosen else []), "gloo", *there)
        missing = [peer for peer in able if peer not in there]
        if missing:
            print(f"without {', '.join(missing)}: run `make peers` to compare with them", file=sys.stderr)
    return Sweep(**chosen)


def _read_sweep(name: str, known: set[str]) -> dict[str, Any]:
    path = named_file("sweeps", name)
    settings = read_toml(path, f"sweep {path}")
    unknown = settings.keys() - known
    if unknown:
        raise BenchError(f"sweep {path}: {', '.join(sorted(unknown))} is not one of {', '.join(sorted(known))}")
    for key, value in settings.items():
        if key in ("begin_bytes", "end_bytes"):
            settings[key] = parse_bytes(value)
        elif isinstance(value, list):
            settings[key] = tuple(value)
    return settings


def named_file(folder: str, name: str) -> Path:
    """A file of the repository's benchmarks by its name, or any file by its path."""
    if name.endswith(".toml"):
        return Path(name)
    return (peers.repository() or Path()) / "benchmarks" / folder / f"{name}.toml"


def measure(sweep: Sweep, path: Path | None = None) -> tuple[list[Row], results.Meta]:
    """Runs a sweep with progress on stderr; rows go to `path` as they come."""
    load = os.getloadavg()[0]
    if load > len(os.sched_getaffinity(0)) / 2:
        print(f"load average {load:.1f}: other programs keep this machine busy, and figures are noise", file=sys.stderr)
    # A plain SIGTERM would end this process without ending the ranks.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with _progress() as watch, results.recorder(path) as record:

            def seen(row: Row | None, done: int, total: int) -> None:
                record(row)
                watch(row, done, total)

            outcome = run(sweep, seen)
    finally:
        signal.signal(signal.SIGTERM, before)
    for name, reason in outcome.refused.items():
        print(f"{name} was not measured: {reason}", file=sys.stderr)
    meta = results.circumstances(outcome, load, sweep.hosts)
    if path:
        results.write_meta(path, meta)
    return outcome.rows, meta


@contextlib.contextmanager
def _progress() -> Iterator[Watcher]:
    """A bar on a terminal; elsewhere, or without rich, a line per tenth of the way."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _plain_watcher()
        return
    if not sys.stderr.isatty():
        yield _plain_watcher()
        return
    from rich.console import Console

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting ranks", total=None)

        def watch(row: Row | None, done: int, total: int) -> None:
            bar.update(task, total=total, completed=done, description=_told(row) if row else "")

        yield watch


def _plain_watcher() -> Watcher:
    started, shown = time.monotonic(), [0]
    print("starting ranks", file=sys.stderr, flush=True)

    def watch(row: Row | None, done: int, total: int) -> None:
        if done * 10 // total > shown[0]:
            shown[0] = done * 10 // total
            told = f"{done}/{total} measurements, {time.monotonic() - started:.0f} s: {_told(row) if row else ''}"
            print(told, file=sys.stderr, flush=True)

    return watch


def _told(row: Row) -> str:
    what = f"{row['collective']}, {row['world']} ranks, {format_bytes(row['bytes'])}"
    return f"round {row['round'] + 1}, {what}: {results.config_of(row)} {row['time_us_p50']:.1f} us"


def _write_report(path: Path, rows: list[Row], meta: results.Meta) -> None:
    if path.is_dir() or path.suffix != ".md":
        path = path / f"{date.today()}-{meta.get('machine', {}).get('name', 'machine')}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.markdown(rows, meta))
    print(f"wrote {path}", file=sys.stderr)


def comma_list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """An option's type: words with commas between them; "none" is none."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(one.strip()) for one in text.split(",") if one.strip() not in ("", "none"))

    return parse


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError("0 or 1")
    return text == "1"
