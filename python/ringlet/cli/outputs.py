"""Files that a command writes at its end, tried before its work begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ringlet.errors import InvalidUsage


def check(files: Mapping[str, Path | None], *, make_folders: bool = False) -> None:
    """Raises InvalidUsage if a file cannot be written, or two options name the same one. Leaves no file behind.

    files: by the option that names each. make_folders: make missing folders.
    """
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = seen.setdefault(path.absolute(), option)
        if other != option:
            raise InvalidUsage(f"{other} and {option} both name {path}: give each a file of its own")
        try:
            if make_folders:
                path.parent.mkdir(parents=True, exist_ok=True)
            _try(path)
        except OSError as error:
            raise InvalidUsage(f"{option}: cannot write {str(path)[:200]}: {error.strerror}{_advice(path)}") from error


def _try(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_dir():  # to open a pipe would wait for its reader
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
        return
    existed = path.exists()
    with open(path, "ab"):
        pass
    if not existed:
        path.unlink()


def _advice(path: Path) -> str:
    try:
        missing = not path.parent.exists()
    except OSError:
        return ""
    return f" (the folder {str(path.parent)[:200]} is missing: make it first)" if missing else ""
