"""The command line: `ringlet run | bench | tune | search | simulate | prove | draw | explore | doctor | version`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

import ringlet
from ringlet import _C
from ringlet.cli import bench, doctor, explore, run, schedule, search, simulate, tune
from ringlet.cli.parser import Parser, did_you_mean

# Each adds its commands; a command's default `run` takes the parsed arguments and returns the exit code.
_PARTS = (run, doctor, schedule, explore, bench, tune, search, simulate)

_EPILOG = """\
examples:
  ringlet doctor                                  does it work here?
  ringlet draw ring --world 5                     what does every rank do?
  ringlet bench --algorithm ring,butterfly -e 16M

`ringlet COMMAND --help` lists the options of a command.
Exit codes: 0 success, 1 check failed, 2 bad arguments or failure, 130 interrupted.
"""


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by their names."""
    parser = Parser(
        prog="ringlet", description="Collective communication for PyTorch, as schedules that are data.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", required=True)
    for part in _PARTS:
        part.add_parsers(commands)
    about = commands.add_parser("version", help="print the versions of ringlet and of the torch that it runs with")
    about.set_defaults(run=lambda args: print(version()) or 0)
    return parser, dict(commands.choices)


def version() -> str:
    built = _C.build_info()
    by = f"built by {built['compiler']} for torch {built['torch']}"
    return f"ringlet {ringlet.__version__}, torch {torch.__version__}, {by}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command; SystemExit with one line on stderr if they are wrong."""
    parser, commands = make_parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in commands:
        parser.error(f"{first[:60]!r} is not a command{did_you_mean(first.lower(), commands)}")
    args, surplus = parser.parse_known_args(words)
    if surplus:
        commands[args.command_name].surplus(surplus)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A failure of ringlet is one line on stderr, without a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    args = parse(words or ("--help",))
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (ringlet.Error, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `ringlet draw ring | head`: the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"ringlet {args.command_name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ringlet {args.command_name}: interrupted", file=sys.stderr)
        return 130
    return code
