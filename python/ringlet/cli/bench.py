"""The command line of `ringlet bench`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ringlet import joining
from ringlet.bench import report, results
from ringlet.bench.cases import NCCL, OWN_OF_NCCL, BenchError, Sweep, format_bytes
from ringlet.bench.plot import FORMATS, plot, require_matplotlib
from ringlet.bench.ranks.case import CALLS, ITEM_BYTES, LISTS, MEMORIES
from ringlet.bench.ranks.data import OPS
from ringlet.bench.run import Row, run
from ringlet.cli import algorithm_files, options, outputs, terminal
from ringlet.supervisor import termination_raises

_EXAMPLES = """\
ringlet bench --algorithm ring,butterfly,two_shot -e 16M
ringlet bench @benchmarks/sweeps/torch.args --json torch.jsonl --plot torch.svg
ringlet bench --world 4,8 -b 64K --peers none
ringlet bench --algorithm ring,mine.py -e 16M

@FILE stands for the options in FILE. Those after it count before them.
bench measures all libraries in turns, size by size, for --rounds rounds, and compares them within a round.
A size is the largest buffer that a rank passes, as in nccl-tests. GB/s are 10^9 bytes a second."""
_LESS_TELLING = ("transport", "count", "type", "redop", "algbw", "min (us)")
_RANK_BYTES = 128 << 20  # the least that a process with torch takes for itself
# nccl-tests' names for things with another name here.
_DTYPES_OF_NCCL_TESTS = {
    "half": "float16", "float": "float32", "double": "float64", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
_OPS_OF_NCCL_TESTS = {"prod": "product"}
# What to give in place of nccl-tests' flags that have no meaning here, or another one in all other commands.
INSTEAD = dict.fromkeys(
    ("-g", "--ngpus", "-t", "--nthreads"),
    "ringlet bench starts one process for each rank, on a GPU of its own where --device is cuda: give --world N",
) | {
    "-n": "give --iters for the timed calls of a measurement, as nccl-tests' other name is, or --world for ranks",
    "-o": "give --op for the operation, or --json or --plot for a file",
    "--hosts": "ranks run on this host: give --world",
}


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise options.refused(text, "0 or 1")
    return text == "1"


def add_to(commands: Any) -> None:
    """The dest of an option is the setting of `Sweep`, whose default counts if the option is None."""
    parser = options.add_command(
        commands, "bench", bench_command,
        help="measure collectives against gloo and NCCL",
        description="Measure a collective over message sizes, against gloo or NCCL, interleaved in one run.",
        examples=_EXAMPLES,
    )  # fmt: skip
    parser.instead, parser.fromfile_prefix_chars = INSTEAD, "@"
    parser.set_defaults(sweep=Sweep)
    what, how = parser.add_argument_group("what to measure"), parser.add_argument_group("how")
    options.add(what, "device", default=None,
        help="of the buffers: KNOWN (default cpu; cuda: compare with NCCL)")  # fmt: skip
    options.add(what, "transport")
    options.add(what, "worlds", names=("--world", "--worlds", "--nproc"), help="numbers of ranks: 2,4,8-16 (default 2)")
    options.add(what, "collectives", known=CALLS, help="KNOWN (default all_reduce)")
    options.add(what, "algorithms", type=algorithm_files.names(none=True),
        help=f"of ringlet, or files: {algorithm_files.FILES} (default auto; none: only the peers)")  # fmt: skip
    options.add(what, "begin", default=None, help="smallest size (default 4)")
    options.add(what, "end", default=None, help="largest size (default 256M)")
    options.add(what, "factor", default=None, help="factor from one size to the next (default 4)")
    what.add_argument("--memory", type=options.names(MEMORIES), metavar="M,M", help=f"{', '.join(MEMORIES)}: of "
        "ringlet.use_registered_allocator() (default registered,ordinary)")  # fmt: skip
    what.add_argument("--via", type=options.names(("api", "torch")), metavar="V,V",
        help="api (ringlet's own interface, the default), torch (torch.distributed)")  # fmt: skip
    what.add_argument("--peers", type=options.names(("gloo", NCCL), none=True), metavar="P,P",
        help="gloo, nccl or none (default gloo; nccl with --device cuda)")  # fmt: skip
    options.add(what, "dtype", type=options.one_of(tuple(ITEM_BYTES), _DTYPES_OF_NCCL_TESTS),
        help="also -d: of torch, or as nccl-tests names it: float, half, ... (default float32)")  # fmt: skip
    what.add_argument("--op", type=options.one_of(OPS, _OPS_OF_NCCL_TESTS), metavar="O",
        help=f"{', '.join(OPS)} (default sum)")  # fmt: skip
    how.add_argument("--iters", dest="iterations", type=options.whole(0), metavar="N",
        help="timed calls of a measurement (default 0: fill --ms)")  # fmt: skip
    options.add(how, "ms", default=None, help="length of a measurement (default 50)")
    how.add_argument("-w", "--warmup_iters", dest="warmup", type=options.whole(1), metavar="N",
        help="warm-up calls of a measurement (default 5; 2 from 16 MiB)")  # fmt: skip
    how.add_argument("-c", "--check", dest="check", type=_switch, nargs="?", const=True, metavar="0|1",
        help="check results (default 1)")  # fmt: skip
    options.add(how, "rounds", default=None, help="repetitions of everything, interleaved (default 5)")
    options.add(how, "timeout", default=None)
    output = parser.add_argument_group("output")
    options.add(output, "json", help="write one object a line, and FILE's .meta.json beside it")
    options.add(output, "plot", type=options.file(*FORMATS),
        help=f"draw time, bus bandwidth and the ratio to the best peer ({', '.join(FORMATS)})")  # fmt: skip


def bench_command(args: argparse.Namespace) -> int:
    """Returns 0, or 1 for wrong elements. An Error if it cannot run, or if a rank died."""
    terminal.require_rich()
    sweep = build_sweep(args)
    require_able(sweep)
    if args.plot:
        require_matplotlib()
    beside = args.json and results.meta_file(args.json)
    outputs.check({"--json": args.json, "--json's .meta.json": beside, "--plot": args.plot}, make_folders=True)
    rows, meta = measure(sweep, args.json)
    if not rows:
        raise BenchError("nothing was measured")
    show([*report.measurements(rows, meta), *report.summary(rows, meta)])
    wrong = results.wrong_elements(rows)
    if wrong:
        print(f"{wrong} wrong elements", file=sys.stderr)
    if args.plot:
        with outputs.naming(args.plot):
            plot(rows, args.plot)
    return 1 if wrong else 0


def show(tables: Iterable[report.Table]) -> None:
    for table in tables:
        terminal.print_table(
            table.columns, table.rows, words=range(table.left), title=table.title,
            less_telling=[name for name in _LESS_TELLING if name in table.columns],
        )  # fmt: skip


def require_able(sweep: Sweep) -> None:
    """BenchError if this machine or ringlet cannot run the sweep."""
    if reason := sweep.refusal():
        raise BenchError(reason)
    require_device(sweep)
    wish = sweep.transport or joining.default_transport()
    if wish not in options.TRANSPORTS:
        known = ", ".join(options.TRANSPORTS)
        raise BenchError(f'RINGLET_TRANSPORT="{wish}": the ranks are processes; set one of {known}')
    for collective in sweep.collectives if "api" in sweep.via else ():
        more = ("nccl",) if sweep.device != "cpu" and collective in OWN_OF_NCCL else ()
        for name in sweep.algorithms if collective not in ("barrier", "send_recv", *LISTS) else ():
            algorithm_files.require(name, collective, "--algorithm", *more)
    world, machine = max(sweep.worlds), machine_bytes()
    needed = world * max(sweep.end_bytes, _RANK_BYTES * len({config.job for config in sweep.configs()}))
    if sweep.device == "cpu" and needed > machine:
        raise BenchError(
            f"{world} ranks with buffers of {format_bytes(sweep.end_bytes)} need {needed >> 30} GiB, more than this "
            f"machine's {machine >> 30} GiB: lower --world or -e"
        )


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_device(sweep: Sweep) -> None:
    """BenchError if the sweep is on GPUs, and torch sees none."""
    if sweep.device != "cpu" and not getattr(torch, sweep.device).is_available():
        raise BenchError(f"device: torch {torch.__version__} sees no {sweep.device} here (ringlet doctor says more)")


def build_sweep(args: argparse.Namespace) -> Sweep:
    """Takes defaults, then options. On GPUs, the defaults are others."""
    given = {setting.name: getattr(args, setting.name, None) for setting in dataclasses.fields(Sweep)}
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("device", "cpu") != "cpu":
        chosen = {"peers": (NCCL,), "memory": ("ordinary",)} | chosen
    return args.sweep(**{"peers": ("gloo",)} | chosen)


def measure(sweep: Sweep, path: Path | None = None) -> tuple[list[Row], results.Meta]:
    """Runs a sweep with progress on stderr; rows go to `path` as they come."""
    load, most, cores = os.getloadavg()[0], max(sweep.worlds), len(os.sched_getaffinity(0))
    if load > cores / 2:
        print(f"load average {load:.1f}: other programs keep this machine busy, and figures are noise", file=sys.stderr)
    busy = f": {most} take turns on {cores} processors, and need a while to start" if most > 4 * cores else ""
    with (
        termination_raises(),
        terminal.progress(f"starting ranks{busy}", lines=True) as watch,
        results.recorder(path) as record,
    ):

        def seen(row: Row | None, done: int, total: int) -> None:
            record(row)
            watch(done, total, _row_text(row) if row else "")

        outcome = run(sweep, seen)
    for name, reason in outcome.refused.items():
        print(f"{name} was not measured: {reason}", file=sys.stderr)
    meta = results.circumstances(load, outcome) | sweep.circumstances()
    if path:
        results.write_meta(path, meta)
    return outcome.rows, meta


def _row_text(row: Row) -> str:
    what = f"{row['collective']}, {row['world']} ranks, {format_bytes(row['bytes'])}"
    return f"round {row['round'] + 1}, {what}: {results.config_of(row)} {row['time_us_p50']:.1f} us"
