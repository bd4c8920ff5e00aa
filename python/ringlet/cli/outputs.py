"""Files that a command writes at its end, tried before its work begins, and tables, which groups may read meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
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
            folder = f" (is the folder {str(path.parent)[:200]} there?)" if isinstance(error, FileNotFoundError) else ""
            raise InvalidUsage(f"{option}: cannot write {str(path)[:200]}: {error.strerror}{folder}") from error


def _try(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_dir():  # to open a pipe would wait for its reader
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
        return
    existed = path.exists()
    with open(path, "ab"):
        pass
    if not existed:
        path.resolve().unlink()  # of a link that leads nowhere, not the link


def write(path: Path, text: str) -> None:
    """Writes the file. InvalidUsage that names it if that fails, as on a disk that is full after all the work."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What a write of this file raises inside names the file, as InvalidUsage."""
    try:
        yield
    except BrokenPipeError:  # a pipe whose reader has what it wants
        raise
    except OSError as error:
        raise InvalidUsage(f"cannot write {str(path)[:200]}: {error.strerror}") from error


def table_text(path: Path) -> str:
    """The text of the table that `path` holds; empty if it holds none. InvalidUsage if that is no text."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""  # to read a pipe would wait for its writer
    except UnicodeDecodeError as error:
        raise InvalidUsage(not_text(path)) from error


def not_text(path: Path | str) -> str:
    """The message about a table with a byte that is not UTF-8."""
    return f"{path} is not UTF-8 text: correct the table, or remove it"


def write_table(path: Path, text: str) -> None:
    """Replaces the file at once, because groups may read it meanwhile, and there is a table at every moment. Keeps the
    previous file beside it as NAME.before: a user may have written it. Follows links.

    Anything else than a file, such as a pipe or /dev/null, is written to and stays.
    """
    if path.exists() and not path.is_file():
        write(path, text)
        return
    target = path.resolve()
    fresh, copy = (target.with_name(f".{target.name}.{os.getpid()}{end}") for end in ("", ".before"))
    try:
        with naming(path):
            fresh.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copy2(target, copy)
                copy.replace(target.with_name(f"{target.name}.before"))
            fresh.replace(target)
    finally:
        for left in (fresh, copy):
            left.unlink(missing_ok=True)
