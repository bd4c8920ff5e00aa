"""`ringlet reveal`: in which order a library's all-reduce adds, seen from outside."""

from __future__ import annotations

import argparse
import functools
import json
import re
from typing import Any

from ringlet.bench.cases import Sweep
from ringlet.bench.jobs import Jobs
from ringlet.bench.ranks.case import MEMORIES, Case
from ringlet.cli import algorithm_files, options, outputs
from ringlet.schedule import draw_trees
from ringlet.summation.probe import NUMBERS, REVEALED, numbers_of
from ringlet.summation.report import Revealed, reveal_call

TARGETS = ("gloo", "nccl")
_OWN = "ringlet:"


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "reveal", reveal_command,
        help="show the order in which a library sums",
        description="Start the ranks of a library, and find out from the results of its all-reduce in which order it "
        "adds every element, and what the order depends on: the element's place, the message's size, the rank, the "
        "calls before, the memory. Two libraries are shown side by side.",
        examples="ringlet reveal gloo -n 4\n"
        "ringlet reveal gloo ringlet:ring -n 3 --sizes 1000..64K -o trees.svg\n"
        "ringlet reveal my_module:all_reduce -n 4 --dtype bfloat16",
    )  # fmt: skip
    parser.set_defaults(jobs=Jobs)
    parser.add_argument("targets", nargs="+", type=target, metavar="TARGET",
        help=f"one of {', '.join(TARGETS)}, ringlet:ALGORITHM, or MODULE:FUNCTION of a tensor, which sums in place or "
        "gives the sum; its ranks are in the default groups of ringlet, and of torch.distributed on gloo")  # fmt: skip
    options.add(parser, "world", default=4, help="also -n: number of ranks (default 4)")
    parser.add_argument("--sizes", type=options.sizes, default="1..1M,999999", metavar="S,S|S..S",
        help="elements of the messages; a range goes up by factors of 2 (default 1..1M,999999: an odd number shows "
        "what is done beyond the last whole vector). Between them, the sizes at which the order changes "
        "are searched for")  # fmt: skip
    parser.add_argument("--calls", type=options.whole(1, 1000), default=2, metavar="K",
        help="how often each message is probed, and compared (default 2)")  # fmt: skip
    told = "one of KNOWN (default %(default)s)"
    options.add(parser, "dtype", type=options.one_of, known=tuple(NUMBERS), default="float32", help=told)
    options.add(parser, "collective", known=REVEALED, default="all_reduce")
    parser.add_argument("--memory", type=options.one_of(MEMORIES), default="ordinary", metavar="M",
        help="of ringlet's tensors: registered or ordinary (default ordinary)")  # fmt: skip
    for name in ("transport", "device", "timeout"):
        options.add(parser, name)
    options.add(parser, "output", type=options.file(".svg"), help="draw the trees to FILE.svg")
    options.add(parser, "json")


def reveal_command(args: argparse.Namespace) -> int:
    """Returns 0; InvalidUsage if a library cannot be started, or does not sum."""
    outputs.check({"-o": args.output, "--json": args.json})
    for target in args.targets:
        numbers_of(_case(target, args))
    found = [_revealed(target, args) for target in args.targets]
    for one in found:
        print(one.text())
    if len(found) == 2:
        print(_compared(*found))
    if args.json:
        outputs.write(args.json, json.dumps([one.plain() for one in found], indent=1) + "\n")
    if args.output:
        outputs.write(args.output, draw_trees.svg([one.plain() for one in found]))
    return 0


def _revealed(target: str, args: argparse.Namespace) -> Revealed:
    case, name = _case(target, args), "ringlet/api" if target.startswith(_OWN) else target
    settings = {"timeout_s": args.timeout_s, "transport": args.transport or "", "device": args.device}
    with args.jobs([name], args.world, Sweep(memory=(args.memory,), **settings)) as jobs:
        ask = functools.partial(jobs[name].ask, timeout_s=args.timeout_s)
        return reveal_call(ask, case, args.sizes, target=target, version=jobs[name].version, calls=args.calls)


def _case(target: str, args: argparse.Namespace) -> Case:
    algorithm = target.removeprefix(_OWN) if target.startswith(_OWN) else "auto"
    algorithm_files.require(algorithm, args.collective, target)
    return Case(args.collective, algorithm, args.memory, "api", args.world, 0, 0, args.dtype, "sum")


def _compared(one: Revealed, other: Revealed) -> str:
    """In how many of the messages both add all elements in the same order."""
    same = sum(a.layouts == b.layouts for a, b in zip(one.messages, other.messages, strict=True))
    return f"{one.target} and {other.target} add in the same order at {same} of {len(one.messages)} sizes"


def target(text: str) -> str:
    if text not in TARGETS and not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise options.refused(text, f"one of {', '.join(TARGETS)}, nor ringlet:ALGORITHM or MODULE:FUNCTION")
    return text
