"""The command line: `ringlet run | bench | tune | prove | draw | doctor`, or `python -m ringlet ...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import ringlet
from ringlet import doctor, run, tune
from ringlet.bench import cli as bench_cli
from ringlet.schedule import cli as schedule_cli

_EPILOG = """\
example:
  ringlet bench --algorithms ring,butterfly,two_shot -e 16M

`ringlet COMMAND --help` tells a command's options. Exit codes: 0 well, 1 something is not as it should be,
2 bad arguments or a failure, told in one line, 130 interrupted.
"""


def make_parser() -> argparse.ArgumentParser:
    """Each command sets `run`: a function of the parsed arguments that returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="ringlet",
        description="Collective communication for PyTorch, as schedules that are data.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringlet {ringlet.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bench_cli.add_parsers(commands)
    tune.add_parsers(commands)
    schedule_cli.add_parsers(commands)
    doctor.add_parsers(commands)
    run.add_parsers(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A failure of ringlet is one line on stderr, without a traceback."""
    args = make_parser().parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (ringlet.Error, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `ringlet draw ring | head`: the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"ringlet: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ringlet: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
