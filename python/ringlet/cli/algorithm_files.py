"""Algorithms that a command is given as files: mine.py, mine.py:name, schedule.json or program.xml.

The types of options here take names of algorithms too. The processes that a command starts inherit its environment, so
each file joins RINGLET_ALGORITHMS, and their groups know its algorithms by name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ringlet.cli import options
from ringlet.cli.terminal import did_you_mean
from ringlet.errors import InvalidUsage
from ringlet.schedule import Algorithm, algorithms, load
from ringlet.schedule.loading import ENDINGS, VARIABLE, file_of, given_files, load_given

BUILT_IN = tuple(dict.fromkeys(name for name, _, _ in algorithms()))
FILES = "mine.py, mine.py:name, FILE.json or FILE.xml (MSCCL)"


def read(text: str) -> list[Algorithm]:
    """All algorithms of a file, or the one whose name follows a colon. Raises InvalidUsage, as `load` does, and if
    there is none of this name."""
    path, _, name = text.partition(":")
    made = load(path)
    found = [one for one in made if not name or one.name == name]
    if not found:
        raise InvalidUsage(f"{options.shown(text)} is none of {_listed(path, made)}")
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*given_files(), str(Path(path).absolute())]))
    return found


of_file = options.checked(read)


@options.checked
def one(text: str) -> str | Algorithm:
    """A type for argparse: a name, or the only algorithm of a file, or its algorithm of a name."""
    if not is_file(text):
        return options.one_of((*BUILT_IN, *(own.name for own in load_given())))(text)
    found = of_file(text)
    if len(found) != 1:
        several = _listed(text.partition(":")[0], found)
        raise argparse.ArgumentTypeError(f"{options.shown(text)} has several: give one of {several}")
    return found[0]


def names(*, none: bool = False) -> Callable[[str], tuple[str, ...]]:
    """A type for argparse: names with commas between them, as options.names has them, and the names in files."""
    own: list[Algorithm] = []  # of all arguments of the option

    def parse(text: str) -> tuple[str, ...]:
        found: list[str] = []
        for word in text.split(","):
            if is_file(word):
                made = read(word)
                own.extend(made)
                require_names_apart(own)
                found += [one.name for one in made]
            else:
                found += options.names(none=none)(word)
        return tuple(dict.fromkeys(found))

    return options.checked(parse)


@options.checked
def built_in_or_given(text: str) -> tuple[str, ...]:
    """A type for argparse: names with commas between them, of algorithms built in or in RINGLET_ALGORITHMS."""
    return options.names((*BUILT_IN, *(own.name for own in load_given())))(text)


def require_names_apart(own: Iterable[Algorithm], what: str = "give") -> None:
    """Raises InvalidUsage if two files have an algorithm of one name: what a command shows could not tell which."""
    seen: dict[tuple[str, str], Algorithm] = {}
    for one in own:
        other = seen.setdefault((one.collective, one.name), one)
        if other is not one:
            files = " and ".join(str(file_of(each) or each.origin) for each in (other, one))
            raise InvalidUsage(f"{files} both have the {one.collective} algorithm {one.name}: {what} one at a time")


def require(name: str, collective: str, option: str, *others: str) -> None:
    """Raises InvalidUsage, which begins with the option, unless the collective has this algorithm. others: more that it
    has."""
    known = ["auto", *(built_in for built_in, of, _ in algorithms() if of == collective), *others]
    known += [own.name for own in load_given() if own.collective == collective]
    if name not in known:
        near = did_you_mean(name, known)
        raise InvalidUsage(f"{option}: {options.shown(name)} is not one of {collective}'s: {', '.join(known)}{near}")


def comment(used: Iterable[str]) -> str:
    """The line of a table that says what its programs need, if its rules name algorithms of files."""
    names = set(used)
    needed = [path for path in given_files() if names.intersection(one.name for one in load(path))]
    return f"# Programs that use this table need {VARIABLE}={os.pathsep.join(needed)}\n" if needed else ""


def is_file(text: str) -> bool:
    return text.partition(":")[0].lower().endswith(ENDINGS)


def _listed(path: str, made: Iterable[Algorithm]) -> str:
    return ", ".join(f"{path}:{one.name}" for one in made)
