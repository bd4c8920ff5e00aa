"""The command line: `ringlet COMMAND`; the parts below list the commands."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

import torch

import ringlet
from ringlet import _C
from ringlet.cli import bench, doctor, draw, explore, prove, reveal, run, search, simulate, tune
from ringlet.cli.options import Parser
from ringlet.cli.terminal import did_you_mean
from ringlet.schedule import ScheduleError

# Each adds its command (options.add_command).
_PARTS = (run, doctor, prove, draw, explore, reveal, bench, tune, search, simulate)

_EPILOG = """\
examples:
  ringlet doctor                                  does it work here?
  ringlet draw ring --world 5                     what does every rank do?
  ringlet bench --algorithm ring,butterfly -e 16M

`ringlet COMMAND --help` lists the options of a command.
Exit codes: 0 success, 1 check failed, 2 bad arguments or failure, 130 interrupted.
"""
_READER_LEFT = 128 + signal.SIGPIPE

# What is printed for the characters of drawings where the encoding of the output lacks them; else "?".
_PLAIN = dict(zip("▁▂▃▄▅▆▇█·→µö", ".:-=+*%#.>uo", strict=True))


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by their names."""
    about = "Collective communication for PyTorch, as schedules that are data."
    parser = Parser(prog="ringlet", description=about, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command_name", required=True)
    for part in _PARTS:
        part.add_to(commands)
    about = "print the versions of ringlet and of the torch that it runs with"
    commands.add_parser("version", help=about).set_defaults(run=lambda args: print(version()) or 0)
    return parser, dict(commands.choices)


def version() -> str:
    built = _C.build_info()
    by = f"built by {built['compiler']} for torch {built['torch']}"
    return f"ringlet {ringlet.__version__}, torch {torch.__version__}, {by}"


def parse(words: Sequence[str], parsers: tuple[Parser, dict[str, Parser]] | None = None) -> argparse.Namespace:
    """The arguments of one command; SystemExit with one line on stderr if they are wrong."""
    parser, commands = parsers or make_parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in commands:
        parser.error(f"{first[:60]!r} is not a command{did_you_mean(first.lower(), commands)}")
    args, surplus = parser.parse_known_args(words)
    if surplus:
        commands[args.command_name].surplus(surplus)
    return args


def main(arguments: Sequence[str] | None = None, parsers: tuple[Parser, dict[str, Parser]] | None = None) -> int:
    """Runs one command and returns its exit code. A failure of ringlet is one line on stderr, without a traceback.
    parsers: as of `make_parser`, perhaps with more options.

    If the reader of the output leaves (`ringlet draw ring | head`), returns the code that the command had computed, or
    else 141, as a shell reports SIGPIPE.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it (`>&-`): what a command writes there goes nowhere
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=_plain.__name__)
    words = sys.argv[1:] if arguments is None else arguments
    name, code, said = "ringlet", _READER_LEFT, ""
    try:
        args = parse(words or ("--help",), parsers)
        name = f"ringlet {args.command_name}"
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except (ringlet.Error, ScheduleError, OSError) as error:  # an algorithm of a file may be wrong
        code, said = 2, str(error)
        if getattr(error, "errno", None) == errno.EMFILE:
            said += "; raise ulimit -n"
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    finally:
        if said:
            with contextlib.suppress(OSError):  # nobody reads it
                print(f"{name}: {said}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Python flushes at its end too, and would exit with a code of its own
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _plain(error: UnicodeError) -> tuple[str, int]:
    """A handler of characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(_plain.__name__, _plain)
