"""The options of all commands. An option has one name and one meaning, and its type refuses a wrong value in one line.

`add` takes an option from the table below. A type raises ArgumentTypeError, which says what the option takes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ringlet import joining
from ringlet.bench.cases import DEVICES
from ringlet.bench.rules import MARGIN
from ringlet.cli.terminal import did_you_mean
from ringlet.schedule.collectives import COLLECTIVES
from ringlet.schedule.hosts import SYNTAX, parse_hosts

MOST_WORLD = 1024
TRANSPORTS = tuple(name for name in joining.TRANSPORTS if name != "threads")  # ranks of a command are processes
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 40
_Value = TypeVar("_Value")

# --- the types


def shown(text: str) -> str:
    """The given text in quotes, cut if it is long."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."


def refused(text: str, takes: str, known: Iterable[str] = ()) -> argparse.ArgumentTypeError:
    """The error of a value. takes: what the option takes; known: names, of which the nearest is suggested."""
    return argparse.ArgumentTypeError(f"{shown(text)} is not {takes}{did_you_mean(text, known)}")


def checked(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A type of a function whose ValueError says what is wrong. (InvalidUsage is one.)"""

    def typed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


hosts = checked(parse_hosts)


def size(text: str) -> int:
    """`4`, `64K`, `256M`, `1G`, `1MiB`: powers of 1024."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    number = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 1 <= number <= _LARGEST:
        raise refused(text, "a size from 1 to 1024G: write 4, 64K, 256M or 1GiB")
    return number


def sizes(text: str) -> tuple[int, ...]:
    """ "1..1K,5000" -> (1, 2, 4, ..., 1024, 5000), ascending."""
    found: set[int] = set()
    for word in text.split(","):
        first, dots, last = word.partition("..")
        low, high = size(first), size(last if dots else first)
        if low > high:
            raise argparse.ArgumentTypeError(f"{shown(word)}: the first size is larger than the last")
        while low < high:
            found.add(low)
            low *= 2
        found.add(high)
    return tuple(sorted(found))


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*-?\d{1,15}\s*", text) or not least <= int(text) <= most:
            raise refused(text, f"a whole number from {least} to {most}")
        return int(text)

    return parse


def number(above: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if above < float(text) <= most:
                return float(text)
        raise refused(text, f"a number above {above:g}, at most {most:g}")

    return parse


def worlds(text: str) -> tuple[int, ...]:
    """ "1-4,8" -> (1, 2, 3, 4, 8)"""
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MOST_WORLD:
            raise refused(text, f"a list of worlds from 1 to {MOST_WORLD}: write 4, 1-64 or 2,4,8-16")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def name(text: str) -> str:
    """Any word except an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: give one")
    return text


def one_of(known: Sequence[str], others: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """One of `known`. others: names that other programs have for some of them."""

    def parse(text: str) -> str:
        name = (others or {}).get(text, text)
        if name not in known:
            raise refused(text, f"one of {', '.join(known)}", known)
        return name

    return parse


def names(known: Sequence[str] = (), *, none: bool = False) -> Callable[[str], tuple[str, ...]]:
    """Words with commas between them, each once. known: all there are (empty: not checked); none: "none" is none."""
    word = one_of(known) if known else name

    def parse(text: str) -> tuple[str, ...]:
        if none and text.strip() == "none":
            return ()
        return tuple(dict.fromkeys(word(part.strip()) for part in text.split(",")))

    return parse


def file(*endings: str) -> Callable[[str], Path]:
    """A path to write to. endings: those that its name may have; none: any."""

    def parse(text: str) -> Path:
        path = Path(text)
        if not path.name:
            raise argparse.ArgumentTypeError(f"{shown(text)} names no file")
        if endings and path.suffix.lower() not in endings:
            formats = f"must end in {' or '.join(endings)}, which chooses the format"
            raise argparse.ArgumentTypeError(f"{shown(text)} {formats}")
        return path

    return parse


# --- the options: their names, of which the help shows the first, and what argparse's add_argument takes. A type that
# --- has `known` values is made of them, and the help's KNOWN are these.

_WORLD = ("--world", "-n", "--worlds", "--nproc")
_COLLECTIVE = ("--collective", "--collectives")
_OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "world": (_WORLD, {"type": whole(1, MOST_WORLD), "metavar": "N", "help": "number of ranks (default %(default)s)"}),
    "worlds": (_WORLD, {"dest": "worlds", "type": worlds, "metavar": "N,N",
        "help": "numbers of ranks: 2,4,8-16 (default %(default)s)"}),
    "hosts": (("--hosts",), {"type": hosts, "metavar": "HOSTS", "help": SYNTAX}),
    "collective": (_COLLECTIVE, {"type": one_of, "known": COLLECTIVES, "metavar": "C",
        "help": "one of KNOWN (default %(default)s)"}),
    "collectives": (_COLLECTIVE, {"dest": "collectives", "type": names, "known": COLLECTIVES, "metavar": "C,C",
        "help": "only these of KNOWN"}),
    "algorithms": (("--algorithm", "--algorithms"), {"dest": "algorithms", "metavar": "A,A"}),
    "root": (("--root",), {"type": whole(0), "default": 0, "metavar": "R",
        "help": "root rank of a rooted collective (default 0)"}),
    "machine": (("--machine",), {"required": True, "metavar": "FILE"}),
    "begin": (("-b", "--minbytes"), {"dest": "begin_bytes", "type": size, "default": "1K", "metavar": "BYTES",
        "help": "smallest size (default %(default)s)"}),
    "end": (("-e", "--maxbytes"), {"dest": "end_bytes", "type": size, "default": "16M", "metavar": "BYTES",
        "help": "largest size (default %(default)s)"}),
    "factor": (("-f", "--stepfactor"), {"dest": "factor", "type": whole(2), "default": 16, "metavar": "F",
        "help": "factor from one size to the next (default %(default)s)"}),
    "rounds": (("--rounds",), {"type": whole(1), "default": 5, "metavar": "R",
        "help": "repetitions of everything, interleaved (default %(default)s)"}),
    "ms": (("--ms",), {"dest": "sample_ms", "type": number(0, 1e7), "default": 50.0, "metavar": "MS",
        "help": "length of a measurement (default %(default)g)"}),
    "margin": (("--margin",), {"type": number(-100, 1e12), "default": 100 * MARGIN, "metavar": "PERCENT",
        "help": "least gain of a rule over the built-in choice (default %(default)g)"}),
    "transport": (("--transport",), {"type": one_of, "known": TRANSPORTS, "metavar": "T",
        "help": "of ringlet: KNOWN (default RINGLET_TRANSPORT, or auto)"}),
    "device": (("--device",), {"type": one_of, "known": DEVICES, "default": "cpu", "metavar": "D",
        "help": "of the buffers: KNOWN (default cpu)"}),
    "dtype": (("--dtype", "-d", "--datatype"), {"metavar": "D"}),
    "timeout": (("--timeout",), {"dest": "timeout_s", "type": number(0, 1e6), "default": 120.0, "metavar": "S",
        "help": "longest wait for any answer (default 120)"}),
    "json": (("--json",), {"type": file(), "metavar": "FILE", "help": "also write everything to FILE, for programs"}),
    "plot": (("--plot",), {"metavar": "FILE"}),
    "output": (("-o", "--output"), {"dest": "output", "metavar": "FILE"}),
}  # fmt: skip


def add(container: Any, label: str, **changes: Any) -> None:
    """An option of the table, with what is different in this command; `names` if some of them mean something else."""
    names, settings = _OPTIONS[label]
    settings = settings | changes
    names = settings.pop("names", names)
    if known := settings.pop("known", None):
        settings["type"] = settings["type"](known)
        settings["help"] = settings["help"].replace("KNOWN", ", ".join(known))
    container.add_argument(*names, **settings)


# --- the parser


class _Help(argparse.HelpFormatter):
    """Wraps a description of one paragraph, leaves the lines of examples as they are, shows one name of an option."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        first = copy.copy(action)
        first.option_strings = action.option_strings[:1] if action.nargs != 0 else action.option_strings
        return super()._format_action_invocation(first)


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names only: an abbreviation would change its meaning with the next option.

    instead: what to give in place of options that other programs have, by these options.
    """

    instead: Mapping[str, str] = {}
    _given: Sequence[str] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=_Help, allow_abbrev=False)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A line of a file of options: words, and a comment."""
        return arg_line.partition("#")[0].split()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = args or ()
        try:
            return super().parse_known_args(args, namespace)
        except UnicodeDecodeError as error:
            self.error(f"a file of options must be UTF-8 text: {error}")

    def error(self, message: str) -> NoReturn:
        options = [
            word for word in self._given if word.startswith("--") and word.partition("=")[0] not in self._names()
        ]
        if re.match("argument [^-]", message) and options and options != ["--"]:
            self.surplus(options)  # the argument was meant as its value
        line = " ".join(re.sub(r"(?<!\S)(--?[a-z][\w-]*)(/--?[\w-]+)+", r"\1", message).split())  # of names, the first
        line = line if len(line) <= 500 else f"{line[:500]}..."
        self.exit(2, f"{self.prog}: {line} (see {self.prog} --help)\n")

    def surplus(self, words: Sequence[str]) -> NoReturn:
        """The error of arguments that no option takes."""
        word = words[0].partition("=")[0]
        what = "no such option" if word.startswith("-") else "no option takes this argument"
        self.error(f"{word}: {self.instead.get(word) or what + did_you_mean(word, self._names())}")

    def _names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, help: str, description: str, examples: str
) -> Parser:
    """Adds a command; `run` takes its arguments and returns the exit code. examples: lines, and what is said below."""
    lines = "\n".join(re.sub(r"^(?=ringlet|torchrun)", "  ", line) for line in examples.splitlines())
    parser: Parser = commands.add_parser(name, help=help, description=description, epilog=f"examples:\n{lines}\n")
    parser.set_defaults(run=run)
    return parser
