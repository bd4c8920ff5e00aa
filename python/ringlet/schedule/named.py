"""The names of this process's own algorithms, and the files that make them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringlet.errors import InvalidUsage
from ringlet.schedule.author import Algorithm

ENDINGS = (".py", ".json", ".xml")
VARIABLE = "RINGLET_ALGORITHMS"  # files, as PATH has folders

_names = threading.RLock()  # a file that is loaded registers
_registered: dict[tuple[str, str], Algorithm] = {}  # the newest of each (collective, name)
_by_slot: dict[int, Algorithm] = {}
_loaded: dict[Path, tuple[bytes, list[Algorithm]]] = {}  # by file: a digest of its text, and what it made
_loading: list[list[Algorithm]] = []  # of the files that run now


def register(made: Algorithm) -> Algorithm:
    """Gives an algorithm its name in this process. The same function again is the same algorithm. If another function
    has the name, later calls use the new one. Raises InvalidUsage for the name of a built-in algorithm."""
    import ringlet._C as _C

    key = (made.collective, made.name)
    with _names:
        placed = _registered.get(key)
        if placed is None or not _alike(placed, made):
            slot = _C.add_algorithm(made.collective, made.name, made.summary)
            placed = _registered[key] = _by_slot[slot] = replace(made, slot=slot)
        for made_here in _loading:
            made_here.append(placed)
        return placed


def registered(name: str | None = None, collective: str | None = None) -> list[Algorithm]:
    """This process's own algorithms, the newest of each name; or only those of a name or a collective."""
    with _names:
        found = list(_registered.values())
    return [a for a in found if a.name == (name or a.name) and a.collective == (collective or a.collective)]


def at_slot(slot: int) -> Algorithm:
    """The algorithm that the core knows by that number."""
    return _by_slot[slot]


def load(path: Path) -> list[Algorithm]:
    """See ringlet.schedule.author.load."""
    path = path.absolute()
    if path.suffix not in ENDINGS:
        raise InvalidUsage(f"{path}: the name of a file of algorithms must end in {', '.join(ENDINGS)}")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidUsage(f"{path}: cannot read the file: {error.strerror}") from error
    key = hashlib.sha256(text).digest()
    with _names:
        before = _loaded.get(path)
        if before is not None and before[0] == key:
            return list(before[1])
        made = _run(path) if path.suffix == ".py" else _read(path, text)
        _loaded[path] = (key, made)
        return list(made)


def load_given() -> None:
    """Registers the algorithms of the files that RINGLET_ALGORITHMS names. A new group does this first."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        try:
            load(Path(name))
        except InvalidUsage as error:
            raise InvalidUsage(f"{VARIABLE}: {error}") from error


def _read(path: Path, text: bytes) -> list[Algorithm]:
    """The algorithm of a file of schedules."""
    from ringlet.schedule.schedule_file import algorithm_of_file

    try:
        return [register(algorithm_of_file(path, text.decode()))]
    except (ValueError, RecursionError) as error:  # of JSON, of its letters or depth, of the schedule, or of its name
        raise InvalidUsage(f"{path}: {error}") from error


def _run(path: Path) -> list[Algorithm]:
    """The algorithms that the file registers, directly or by an import."""
    name = f"ringlet_algorithms_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and dataclasses look for it there
    made: list[Algorithm] = []
    _loading.append(made)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidUsage(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        _loading.pop()
    if not made:
        raise InvalidUsage(f"{path}: the file makes no algorithm: decorate a function with @ringlet.algorithm(...)")
    return list(dict.fromkeys(made))


def _alike(a: Algorithm, b: Algorithm) -> bool:
    """Whether both are the same function, perhaps made twice: by two threads, or by a notebook cell that ran twice."""
    return (
        a.order == b.order and _content(a.function) == _content(b.function) and _content(a.parts) == _content(b.parts)
    )


def _content(value: Callable[..., Any] | int | None) -> Any:
    """The parts that make a function; the value itself if it is not a plain function."""
    code = getattr(value, "__code__", None)
    if code is None:
        return value
    try:
        cells = tuple(cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
    except ValueError:  # a cell that is empty so far
        return value
    return code, cells, getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)
