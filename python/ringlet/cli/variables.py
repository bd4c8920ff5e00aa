"""ringlet's environment variables: their permitted values, and those with wrong values. For `ringlet doctor`.

The code that reads a variable also checks it, when a group is made or a GPU is used. Here all are checked at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ringlet
from ringlet import _C
from ringlet.cli.terminal import did_you_mean
from ringlet.group import TRANSPORTS
from ringlet.schedule.registry import VARIABLE, load_given

LOG_LEVELS = ("off", "warning", "info", "debug")


@dataclass(frozen=True)
class Variable:
    """takes: what it allows, in words. right: whether a value is that; an error of its own says more."""

    takes: str
    right: Callable[[str], bool]


def problems(environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, str, str]]:
    """(variable, what is wrong, what to do) of each that is set and wrong. An empty value counts as not set."""
    environment = os.environ if environment is None else environment
    for name in sorted(name for name in environment if name.startswith("RINGLET_") and environment[name]):
        value, variable = environment[name], VARIABLES.get(name)
        if variable is None:
            yield name, "is no variable of ringlet", f"nothing reads it{did_you_mean(name, VARIABLES)}"
            continue
        told = f'"{value[:80]}" is not {variable.takes}'
        try:
            if variable.right(value):
                continue
        except (ringlet.Error, OSError, ValueError) as error:
            told = str(error)
        yield name, told, f"set {name} to {variable.takes}, or unset it"


def _from(least: int) -> Callable[[str], bool]:
    return lambda value: bool(re.fullmatch(r"[0-9]{1,13}", value)) and int(value) >= least


def _among(*known: str) -> Callable[[str], bool]:
    return lambda value: value in known


def _accepted(check: Callable[[], object]) -> Callable[[str], bool]:
    """Whether ringlet's own check accepts the value. That check reads the variable itself."""

    def right(value: str) -> bool:
        check()
        return True

    return right


def _table() -> None:
    _C.chosen("all_reduce", 1, 2, "staged", _C.given_table()[1])


def _has_address(value: str) -> bool:
    return bool(_C.addresses(value))


VARIABLES = {
    VARIABLE: Variable("files of algorithms", _accepted(load_given)),
    "RINGLET_CPU_KERNELS": Variable(
        "one of the kernels of this processor", lambda value: value in _C.kernels()["available"]
    ),
    "RINGLET_CUDA_LIBRARY": Variable("the path of a CUDA library", lambda value: Path(value).is_file()),
    "RINGLET_GPU_HEAP_MIB": Variable("a number of MiB", _from(0)),
    "RINGLET_HEAP_MIB": Variable("a number of MiB from 32 up", _from(32)),
    "RINGLET_HOST_ID": Variable("any name", bool),
    "RINGLET_INTERFACE": Variable("the name of an interface with an address", _has_address),
    "RINGLET_LOG": Variable(f"one of {', '.join(LOG_LEVELS)}", lambda value: value.lower() in LOG_LEVELS),
    "RINGLET_LOG_FILE": Variable("a file in a folder that is there", lambda value: Path(value).parent.is_dir()),
    "RINGLET_NCCL_LIBRARY": Variable("the path of an NCCL library", lambda value: Path(value).is_file()),
    "RINGLET_PEER_MEMORY_BYTES": Variable("a number of bytes", _from(0)),
    "RINGLET_TABLE": Variable("the path of a table", _accepted(_table)),
    "RINGLET_TCP_CONGESTION": Variable(
        "a congestion control of this kernel, or system", _accepted(_C.find_congestion_control)
    ),
    "RINGLET_TOPOLOGY": Variable("ignore", _among("ignore")),
    "RINGLET_TRANSPORT": Variable(f"one of {', '.join(TRANSPORTS)}", _among(*TRANSPORTS)),
}
