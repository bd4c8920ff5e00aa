"""ringlet's environment variables: their permitted values, and those with wrong values. For `ringlet doctor`.

The code that reads a variable also checks it, when a group is made or a GPU is used. Here all are checked at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ringlet
from ringlet import _C
from ringlet.cli.terminal import did_you_mean
from ringlet.joining import TRANSPORTS
from ringlet.schedule.loading import VARIABLE, load_given

LOG_LEVELS = ("off", "warning", "info", "debug")


def problems(environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, str, str]]:
    """(variable, what is wrong, what to do) of each that is set and wrong. An empty value counts as not set."""
    environment = os.environ if environment is None else environment
    for name in sorted(name for name in environment if name.startswith("RINGLET_") and environment[name]):
        if name not in VARIABLES:
            yield name, "is no variable of ringlet", f"nothing reads it{did_you_mean(name, VARIABLES)}"
            continue
        takes, right = VARIABLES[name]
        told = f'"{environment[name][:80]}" is not {takes}'
        try:
            if right(environment[name]) is not False:
                continue
        except (ringlet.Error, OSError, ValueError) as error:
            told = str(error)
        yield name, told, f"set {name} to {takes}, or unset it"


def _from(least: int) -> Callable[[str], bool]:
    return lambda value: bool(re.fullmatch(r"[0-9]{1,13}", value)) and int(value) >= least


# What a variable allows, in words, and whether a value is that: False, or an error that says more, if it is not.
VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    VARIABLE: ("files of algorithms", lambda value: load_given()),
    "RINGLET_CPU_KERNELS": (
        "one of the kernels of this processor", lambda value: value in _C.kernels()["available"]
    ),
    "RINGLET_CUDA_LIBRARY": ("the path of a CUDA library", lambda value: Path(value).is_file()),
    "RINGLET_GPU_HEAP_MIB": ("a number of MiB", _from(0)),
    "RINGLET_HEAP_MIB": ("a number of MiB from 32 up", _from(32)),
    "RINGLET_HOST_ID": ("any name", bool),
    "RINGLET_INTERFACE": ("the name of an interface with an address", lambda value: bool(_C.addresses(value))),
    "RINGLET_LOG": (f"one of {', '.join(LOG_LEVELS)}", lambda value: value.lower() in LOG_LEVELS),
    "RINGLET_LOG_FILE": ("a file in a folder that is there", lambda value: Path(value).parent.is_dir()),
    "RINGLET_NCCL_LIBRARY": ("the path of an NCCL library", lambda value: Path(value).is_file()),
    "RINGLET_PEER_MEMORY_BYTES": ("a number of bytes", _from(0)),
    "RINGLET_TABLE": (
        "the path of a table", lambda value: _C.chosen("all_reduce", 1, 2, "staged", _C.given_table()[1])
    ),
    "RINGLET_TCP_CONGESTION": (
        "a congestion control of this kernel, or system", lambda value: _C.find_congestion_control()
    ),
    "RINGLET_TOPOLOGY": ("ignore", lambda value: value == "ignore"),
    "RINGLET_TRANSPORT": (f"one of {', '.join(TRANSPORTS)}", lambda value: value in TRANSPORTS),
}  # fmt: skip
