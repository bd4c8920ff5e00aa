"""Machines as data: the cost of a message inside a host and between hosts, from a TOML file.

    name = "four hosts at 200 Mbit/s"

    [inside]                                     # between ranks of one host
    alpha_us = { value = 8, source = "..." }     # a round of messages, before the first byte
    gbyte_per_s = { value = 4.5, source = "..." }  # of one rank, each way

    [across]                                     # between ranks of two hosts
    alpha_us = { value = 60, source = "..." }
    uplink_gbit_per_s = { value = 0.2, source = "..." }  # of one host, each way, shared by all its messages

    [rank]
    message_us = { value = 3, source = "..." }   # of a rank's time, for each message it sends or receives
    combine_gbyte_per_s = { value = 8, source = "..." }  # bytes combined

Every number has a source, which says where it was measured or published. No number has a default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringlet.errors import InvalidUsage

_EXAMPLE = '{ value = 8, source = "ping-pong, 2026-11-24" }'


@dataclass(frozen=True)
class Machine:
    """Seconds, and seconds per byte. inside_*: between ranks of a host. across_alpha: between hosts. uplink_beta: of
    one host, each way. message: a rank's time for one message. gamma: for one combined byte."""

    name: str
    inside_alpha: float
    inside_beta: float
    across_alpha: float
    uplink_beta: float
    message: float
    gamma: float


_NAMED = Path(__file__).parent / "machines"

# key in the file -> field, and what is divided by a rate, or multiplied by a time, for seconds. Rates must be above 0.
_NUMBERS = {
    "inside.alpha_us": ("inside_alpha", 1e-6),
    "inside.gbyte_per_s": ("inside_beta", 1e-9),
    "across.alpha_us": ("across_alpha", 1e-6),
    "across.uplink_gbit_per_s": ("uplink_beta", 8e-9),
    "rank.message_us": ("message", 1e-6),
    "rank.combine_gbyte_per_s": ("gamma", 1e-9),
}


def names() -> list[str]:
    """The machines that have a name here."""
    return sorted(path.stem for path in _NAMED.glob("*.toml"))


def named(name: str) -> Path:
    """The file of a machine by its name, or else the path of a file."""
    return _NAMED / f"{name}.toml" if name in names() else Path(name)


def read_machine(path: Path) -> Machine:
    """The machine that a file describes. Raises InvalidUsage that names the wrong entry and what to write."""
    content = read_toml(path)
    given: dict[str, Any] = {}
    for name, entry in content.items():
        given |= {f"{name}.{key}": entry[key] for key in entry} if isinstance(entry, dict) else {name: entry}
    unknown = sorted(given.keys() - _NUMBERS.keys() - {"name"})
    if unknown:
        raise InvalidUsage(f"{path}: unknown {', '.join(unknown)}: a machine has name, {', '.join(_NUMBERS)}")
    fields = {}
    for key, (field, unit) in _NUMBERS.items():
        number = _number(path, key, given.get(key))
        fields[field] = unit / number if key.endswith("_per_s") else unit * number
    return Machine(name=str(content.get("name", path.stem)), **fields)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. InvalidUsage, which names the file, if that cannot be read."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError as error:
            raise InvalidUsage(f"{path}: to read TOML, use Python 3.11 or `pip install tomli`") from error
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidUsage(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidUsage(f"{path}: {error}") from error


def _number(path: Path, key: str, given: Any) -> float:
    """The value of an entry that also has its source."""
    entry = given if isinstance(given, dict) else {}
    value, source, rate = entry.get("value"), entry.get("source"), key.endswith("_per_s")
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    right = math.isfinite(number) and (number > 0 if rate else number >= 0)
    if not right or not isinstance(source, str) or not source.strip() or entry.keys() != {"value", "source"}:
        raise InvalidUsage(
            f"{path}: {key} must be a number {'above 0' if rate else 'of at least 0'} with its source: "
            f"write {key.partition('.')[2]} = {_EXAMPLE}"
        )
    return float(number)
