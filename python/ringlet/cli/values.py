"""The types of options for argparse. Each refuses a wrong value, and says what the option takes."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ringlet.cli.terminal import did_you_mean
from ringlet.schedule.hosts import Hosts, parse_hosts

MOST_WORLD = 1024
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 40


def shown(text: str) -> str:
    """The given text in quotes, cut if it is long."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."


def size(text: str | int) -> int:
    """`4`, `64K`, `256M`, `1G`, `1MiB`: powers of 1024."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(i?B)?", str(text).strip(), re.IGNORECASE)
    number = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 1 <= number <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{shown(str(text))} is not a size from 1 to 1024G: write 4, 64K, 256M or 1GiB"
        )
    return number


def sizes(text: str) -> tuple[int, ...]:
    """ "4K,1M" -> (4096, 1048576), ascending."""
    return tuple(sorted({size(word) for word in text.split(",")}))


def hosts(text: str) -> Hosts:
    """Hosts of ranks: `4x2`, `4x2:cyclic` or `3,1,2`."""
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"-?\d{1,15}", text.strip()) else None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {least} to {most}")
        return number

    return parse


def number(above: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number above {above:g}, at most {most:g}")
        return value

    return parse


def worlds(text: str) -> tuple[int, ...]:
    """ "1-4,8" -> (1, 2, 3, 4, 8)"""
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MOST_WORLD:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a list of worlds from 1 to {MOST_WORLD}: write 4, 1-64 or 2,4,8-16"
            )
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def name(text: str) -> str:
    """Any word except an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: give one")
    return text


def world(text: str) -> int:
    """One number of ranks."""
    return whole(1, MOST_WORLD)(text)


def names(known: Sequence[str] = (), *, none: bool = False) -> Callable[[str], tuple[str, ...]]:
    """Words with commas between them, each once. known: all there are (empty: not checked); none: "none" is none."""

    def parse(text: str) -> tuple[str, ...]:
        if none and text.strip() == "none":
            return ()
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        wrong = [word for word in found if not word or (known and word not in known)]
        if wrong:
            takes = f"one of {', '.join(known)}" if known else "a name"
            near = did_you_mean(wrong[0], known)
            raise argparse.ArgumentTypeError(f"{shown(wrong[0])} is not {takes}{', or none' * none}{near}")
        return found

    return parse


def one_of(known: Sequence[str], others: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """One of `known`. others: names that other programs have for some of them."""
    others = others or {}

    def parse(text: str) -> str:
        name = others.get(text, text)
        if name not in known:
            near = did_you_mean(text, known)
            raise argparse.ArgumentTypeError(f"{shown(text)} is not one of {', '.join(known)}{near}")
        return name

    return parse


def file(*endings: str) -> Callable[[str], Path]:
    """A path to write to. endings: those that its name may have; none: any."""

    def parse(text: str) -> Path:
        path = Path(text)
        if not path.name:
            raise argparse.ArgumentTypeError(f"{shown(text)} names no file")
        if endings and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} must end in {' or '.join(endings)}, which chooses the format"
            )
        return path

    return parse
