"""Algorithms in files: a Python file that makes some, or one that has schedules, in JSON or MSCCL-XML."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ringlet.errors import InvalidUsage
from ringlet.schedule import files, msccl
from ringlet.schedule.collectives import BLOCKED
from ringlet.schedule.data import Step
from ringlet.schedule.registry import (
    NAME,
    Algorithm,
    algorithms,
    one_line,
    register,
    register_again,
    registering,
    written,
)

ENDINGS = (".py", ".json", ".xml")
VARIABLE = "RINGLET_ALGORITHMS"  # files, as PATH has folders

_loaded: dict[Path, tuple[bytes, list[Algorithm]]] = {}  # by file: a digest of its text, and what it made


def load(path: str | Path) -> list[Algorithm]:
    """Registers the algorithms that a file has, and returns them: a Python file (.py) that makes some, or one that has
    schedules, in JSON (.json, ringlet/schedule/files.py) or MSCCL-XML (.xml). An algorithm of schedules has the file's
    name, and covers only the worlds in the file.

    A process runs a Python file once, however often it loads it, and again if the file has changed. If another file has
    taken a name since, the name is this file's again. Raises InvalidUsage, which names the file, if it cannot be read,
    fails, or makes no algorithm.
    """
    with registering():
        return [register_again(one) for one in _loaded_from(path)]


def _loaded_from(path: str | Path) -> list[Algorithm]:
    """The algorithms that the file makes. Runs it, and so registers them, if it has not run or has changed."""
    try:
        path = Path(os.fsdecode(path)).absolute()
    except TypeError:
        raise InvalidUsage(f"load: pass the path of a file of algorithms, not {path!r:.60}") from None
    if path.suffix.lower() not in ENDINGS:
        raise InvalidUsage(f"{path}: the name of a file of algorithms must end in {', '.join(ENDINGS)}")
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise InvalidUsage(f"{path}: cannot read the file: {getattr(error, 'strerror', error)}") from error
    key = hashlib.sha256(text).digest()
    with registering():
        before = _loaded.get(path)
        if before is not None and before[0] == key:
            return before[1]
        made = _run(path) if path.suffix.lower() == ".py" else _read(path, text)
        _loaded[path] = (key, made)
        return made


def file_of(one: Algorithm) -> Path | None:
    """The file that made the algorithm; None if no file did."""
    return next((path for path, (_, made) in list(_loaded.items()) if one in made), None)


def given_files() -> list[str]:
    """The files that RINGLET_ALGORITHMS names."""
    return [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def load_given() -> list[Algorithm]:
    """Registers the algorithms of `given_files`, and returns them. A new group does this first."""
    made = []
    for path in given_files():
        try:
            made += _loaded_from(path)
        except InvalidUsage as error:
            raise InvalidUsage(f"{VARIABLE}: {error}") from error
    return made


def _read(path: Path, text: bytes) -> list[Algorithm]:
    """The algorithm of a file of schedules."""
    try:
        return [register(_algorithm_of_file(path, text.decode()))]
    except (ValueError, RecursionError) as error:  # of JSON, of its letters or depth, of the schedule, or of its name
        raise InvalidUsage(f"{path}: {error}") from error


def _run(path: Path) -> list[Algorithm]:
    """The algorithms that the file registers, directly or by an import."""
    name = f"ringlet_algorithms_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))  # by itself importlib wants .py in small letters
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and dataclasses look for it there
    try:
        with registering() as made:
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path)]
        raise InvalidUsage(f"{path}: {one_line(error)}{f' (line {lines[-1]})' if lines else ''}") from error
    if not made:
        raise InvalidUsage(f"{path}: the file makes no algorithm: decorate a function with @ringlet.algorithm(...)")
    return list({(one.collective, one.name): one for one in made}.values())


def _algorithm_of_file(path: Path, text: str) -> Algorithm:
    """The algorithm of a file, under the file's name. It is not registered yet, and covers the file's worlds only.
    Raises ValueError for a file that is wrong."""
    if not NAME.fullmatch(path.stem):
        raise ValueError(
            f"the file's name is the algorithm's: begin it with a letter, and use letters, digits and _ . + -, got "
            f"{path.stem!r}"
        )
    listed = [msccl.from_xml(text, path.stem)] if path.suffix.lower() == ".xml" else files.from_json(text)
    collectives = sorted({schedule.collective for schedule in listed})
    if len(collectives) != 1:
        raise ValueError(f"must have schedules of one collective, got {', '.join(collectives) or 'none'}")
    if (path.stem, collectives[0]) in [(name, of) for name, of, _ in algorithms()]:
        raise ValueError(f'{collectives[0]} has a built-in algorithm "{path.stem}": give the file another name')
    schedules = {(one.world, one.root): one for one in listed}
    if len(schedules) < len(listed):
        twice, _ = Counter((one.world, one.root) for one in listed).most_common(1)[0]
        raise ValueError(f"has two schedules for world {twice[0]}, root {twice[1]}")
    parts_of = {one.world: one.parts for one in listed}
    if any(parts_of[one.world] != one.parts for one in listed):
        raise ValueError("the schedules of one world must have the same parts for every root")
    worlds = ", ".join(map(str, sorted(parts_of)))

    def rounds(rank: int, world: int, root: int) -> Iterator[tuple[Step, ...]]:
        if (world, root) not in schedules:
            raise NotImplementedError(
                f"{path.name} has schedules for worlds {worlds}, and not for {world}, root {root}"
            )
        return (round.steps for round in schedules[world, root].ranks[rank])

    parts = None if collectives[0] in BLOCKED else parts_of.__getitem__
    made = written(collectives[0], path.stem, rounds, parts, "none")
    return replace(made, summary=f"from {path.name}, for worlds {worlds}", origin=path.name)
