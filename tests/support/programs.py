"""Programs that tests start and wait for, and what they leave."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest


def ended(*words: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it said."""
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=timeout, **options)


def printed(*words: object, **options: Any) -> str:
    """What a program printed, that must succeed. options: as of `ended`."""
    done = ended(*words, **options)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def module_at(path: pathlib.Path) -> types.ModuleType:
    """A program's own functions: it is imported from its file, which lies in no package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def need_namespace(kind: str) -> None:
    """Skips the test where this process may not make a namespace of that kind, an option of unshare."""
    if ended("unshare", kind, "true").returncode != 0:
        pytest.skip(f"no namespaces: unshare {kind} fails")


def processes(are: Callable[[pathlib.Path], bool]) -> list[int]:
    """Of this machine those for whose folder in /proc that is true."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if are(entry):
                found.append(int(entry.name))
    return found


def until(reached: Callable[[], object], seconds: float = 60) -> None:
    """Returns when that is true; fails the test if it is not within so many seconds."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not reached in {seconds} s"
        time.sleep(0.01)
