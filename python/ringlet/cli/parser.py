"""An argument parser whose errors are one line, and the options that several commands have: one name, one meaning."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ringlet.cli.terminal import did_you_mean

# An option's documented name, and others that mean the same, some of them nccl-tests'.
_ALSO = {
    "--world": ("-n", "--worlds", "--nproc"),
    "--algorithm": ("--algorithms",),
    "--collective": ("--collectives",),
    "--dtype": ("-d", "--datatype"),
    "-b": ("--minbytes",),
    "-e": ("--maxbytes",),
    "-f": ("--stepfactor",),
    "-w": ("--warmup_iters",),
    "-c": ("--check",),
}
_DOCUMENTED = {other: name for name, others in _ALSO.items() for other in others}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps a description of one paragraph, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text if "\n" in text else super(argparse.RawDescriptionHelpFormatter, self)._fill_text
        return fill(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names only: an abbreviation would change its meaning with the next option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=_Help, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        known = [name for action in self._actions for name in action.option_strings]
        options = [word for word in self._given if word.startswith("--") and word.partition("=")[0] not in known]
        if re.match("argument [^-]", message) and options and options != ["--"]:
            self.surplus(options)  # the argument was meant as its value
        # The documented name of an option, not those that the help does not show.
        message = re.sub(r"^argument (-[\w-]+)[^:]*", lambda label: _documented(label[1], label[0]), message)
        line = " ".join(message.split())
        line = line if len(line) <= 500 else f"{line[:500]}..."
        self.exit(2, f"{self.prog}: {line} (see {self.prog} --help)\n")

    _given: list[str] = []  # noqa: RUF012

    def surplus(self, words: Sequence[str]) -> NoReturn:
        """The error of arguments that no option takes."""
        known = [name for action in self._actions for name in action.option_strings]
        word = words[0].partition("=")[0]
        what = "no such option" if word.startswith("-") else "no option takes this argument"
        self.error(f"{word}: {what}{did_you_mean(word, known)}")


def _documented(name: str, label: str) -> str:
    return f"argument {_DOCUMENTED[name]}" if name in _DOCUMENTED else label


class Elsewhere(argparse.Action):
    """A flag of another program that has another meaning here, or none. The error says what to give instead."""

    def __init__(self, *, instead: str, **settings: Any) -> None:
        super().__init__(**settings, nargs="?", help=argparse.SUPPRESS)
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parser.error(f"{'/'.join(self.option_strings)}: {self._instead}")


def add_option(container: Any, name: str, *, without: Sequence[str] = (), **settings: Any) -> None:
    """An option under its documented name and, which the help does not show, its other ones except for `without`."""
    settings.setdefault("dest", name.lstrip("-"))
    container.add_argument(name, **settings)
    others = [other for other in _ALSO.get(name, ()) if other not in without]
    if others:
        container.add_argument(*others, **settings | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS})
