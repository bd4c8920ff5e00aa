"""What a GPU check runs on, as far as it can be known without ending the check."""

from __future__ import annotations

import contextlib
import importlib.util
import lzma
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from parts import ROOT

VERSION = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}")
"""


def said(*command: str, path: str | None = None) -> str:
    """What a short command prints; "" where there is none or it fails."""
    program = shutil.which(command[0], path=path)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if program:
            done = subprocess.run([program, *command[1:]], capture_output=True, text=True, errors="replace", cwd=ROOT,
                                  timeout=20, check=True, stdin=subprocess.DEVNULL)  # fmt: skip
            return done.stdout.strip()
    return ""


def gpu() -> dict[str, str] | None:
    """Name, driver and memory of the first GPU; None where nvidia-smi is not there or sees none."""
    lines = said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()
    cells = [cell.strip() for cell in lines[0].split(",")] if lines else []
    return dict(zip(("name", "driver", "memory"), cells, strict=True)) if len(cells) == 3 else None


def commit() -> str:
    """Of the checkout; where there is none, what COMMIT says."""
    git = ("git", "-c", f"safe.directory={ROOT}")
    found = said(*git, "log", "-1", "--format=%h") or os.environ.get("COMMIT") or "unknown"
    changed = said(*git, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return found + (" + uncommitted changes" if changed else "")


def torch_version() -> str:
    """Read, not imported: that would take seconds of the GPU's time."""
    with contextlib.suppress(Exception):
        found = importlib.util.find_spec("torch")
        if found is not None and found.origin is not None:
            told = runpy.run_path(str(Path(found.origin).with_name("version.py")))
            return f"{told['__version__']}, CUDA {told['cuda']}"
    return "unknown"


def facts(gpu: dict[str, str], nccl: str, revision: str, search: str) -> list[tuple[str, str]]:
    """The table at the page's head. nccl: what there is of it. search: the PATH of the parts."""
    nvcc = said("nvcc", "--version", path=search).splitlines()
    gcc = said("gcc", "--version", path=search).splitlines()
    return [
        ("GPU", gpu["name"]),
        ("driver", gpu["driver"]),
        ("memory", gpu["memory"]),
        ("torch", torch_version()),
        ("NCCL", nccl),
        ("nvcc", next((line for line in nvcc if "release" in line), "none")),
        ("gcc", gcc[0] if gcc else "none"),
        ("python", platform.python_version()),
        ("commit", revision),
        ("command", f"`{shlex.join([Path(sys.executable).name, *sys.argv])}`"),
    ]


class NoNccl(Exception):
    """There is no NCCL that can be used; the message says why."""


def nccl_library(named: str | None, folder: Path) -> Path:
    """The file that RINGLET_NCCL_LIBRARY names. One that ends with .xz is unpacked to libnccl.so.2 in `folder`, once:
    until the packed one is another."""
    if not named:
        raise NoNccl("RINGLET_NCCL_LIBRARY names none")
    source = Path(named).resolve()
    try:
        if source.suffix != ".xz":
            with open(source, "rb"):
                return source
        unpacked, when = folder / "libnccl.so.2", int(source.stat().st_mtime)
        if not unpacked.exists() or int(unpacked.stat().st_mtime) != when:
            fresh = folder / ".libnccl.so.2.new"
            with lzma.open(source) as packed, open(fresh, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            os.utime(fresh, (when, when))
            os.replace(fresh, unpacked)
        return unpacked
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise NoNccl(f"{source.name}: {error}") from error


def nccl_version(library: Path) -> str:
    """Asked in a process of its own: a library that is none must not end this one."""
    return said(sys.executable, "-c", VERSION, str(library)) or "of unknown version"
