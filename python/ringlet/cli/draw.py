"""`ringlet draw`: the pictures of schedules from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ringlet.cli import algorithm_files, options, outputs
from ringlet.errors import InvalidUsage
from ringlet.schedule import Schedule, schedule
from ringlet.schedule.draw import MOST_BOXES, MOST_BOXES_OF_CHUNKS, boxes, picture
from ringlet.schedule.messages import messages_of

FORMATS = (".svg", ".txt", ".json", ".xml")
MOST_RANKS_DRAWN = 256  # unless forced


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "draw", draw_command,
        help="draw a schedule, as SVG or text",
        description="Draw the steps of every rank in each round. A picture with too many chunks shows ranks instead. "
        "Or write the schedule itself, as JSON or MSCCL-XML, which all commands and ringlet.schedule.load read.",
        examples="ringlet draw ring --world 5\nringlet draw butterfly --world 8 -o butterfly.svg\n"
        "ringlet draw mine.py --world 8 -o mine8.xml",
    )  # fmt: skip
    known = ", ".join(algorithm_files.BUILT_IN)
    parser.add_argument("algorithm", nargs="?", type=algorithm_files.one, metavar="ALGORITHM",
        help=f"one of {known}, or a file: {algorithm_files.FILES}")  # fmt: skip
    options.add(parser, "collective", default="all_reduce")
    size = parser.add_mutually_exclusive_group()
    options.add(size, "world", default="4")  # text: argparse then sees that 4 was given, beside --hosts
    options.add(size, "hosts")
    options.add(parser, "root")
    options.add(parser, "output", type=options.file(*FORMATS),
        help="write a picture to FILE.svg, its text to FILE.txt, or the schedule to FILE.json or FILE.xml")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="draw every chunk, even if the picture becomes very large")


def draw_command(args: argparse.Namespace) -> int:
    """Draws one schedule. Raises InvalidUsage if there is none, or if the picture would be too large to read."""
    outputs.check({"-o": args.output})
    if args.algorithm is None:
        raise InvalidUsage("give one algorithm, for example: ringlet draw ring")
    world = len(args.hosts) if args.hosts else args.world
    is_picture = args.output is None or args.output.suffix.lower() in (".svg", ".txt")
    if is_picture and not args.force:
        _require_readable(world <= MOST_RANKS_DRAWN, f"{world} ranks")
    try:
        collective = args.collective if isinstance(args.algorithm, str) else args.algorithm.collective
        drawn = schedule(args.algorithm, collective, world=world, root=args.root, hosts=args.hosts)
        messages_of(drawn)  # ScheduleError if it has none
        if is_picture and not args.force:
            _require_readable(boxes(drawn) <= MOST_BOXES, f"{drawn.name}: {boxes(drawn)} boxes")
        if args.output:
            print(f"{args.output}: {drawn.name}{_write(args, drawn)}")
        else:
            print(drawn.text(), end="")
    except (ValueError, NotImplementedError) as error:
        raise InvalidUsage(str(error)) from error
    return 0


def _require_readable(readable: bool, what: str) -> None:
    if not readable:
        raise InvalidUsage(f"a picture of {what} would be too large to read: draw fewer ranks, or add --force")


def _write(args: argparse.Namespace, drawn: Schedule) -> str:
    """Writes the picture in the format of the file's ending; returns what to say about it."""
    whole = args.force or boxes(drawn) <= MOST_BOXES_OF_CHUNKS
    ending = args.output.suffix.lower()
    of_svg: Callable[[Schedule], str] = Schedule.svg if whole else picture
    makers = {".svg": of_svg, ".txt": Schedule.text, ".json": Schedule.json, ".xml": Schedule.xml}
    outputs.write(args.output, makers[ending](drawn))
    return "" if whole or ending != ".svg" else ", one bar for each rank (--force draws every chunk)"
