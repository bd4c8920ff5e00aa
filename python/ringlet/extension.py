"""Chooses the extension `ringlet._C` that was built for the torch that is here.

A wheel has one for each minor version of torch that it serves, in folders such as torch_2_13. A clone has one, beside
this file (docs/decisions/0069).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
NAME = "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]


def choose(path: list[str]) -> None:
    """Puts the folder of this torch's extension on the package's `path`. ImportError says why there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"ringlet needs torch, which is not installed here: {_install()}", name="torch") from None
    folder = HERE / "torch_{}_{}".format(*torch.__version__.split(".")[:2])
    path.append(str(folder))
    try:
        importlib.import_module("ringlet._C")
    except ImportError as error:
        if (folder / NAME).exists():
            raise  # it is of this torch, and something else is wrong
        raise ImportError(_explanation(torch.__version__, error), name="ringlet._C") from None


def served() -> list[str]:
    """The versions of torch for which a wheel has an extension, such as "2.13", oldest first; empty in a clone."""
    found = [folder.name.split("_")[1:] for folder in HERE.glob("torch_*_*") if (folder / NAME).exists()]
    return [".".join(version) for version in sorted(found, key=lambda version: [int(part) for part in version])]


def _install() -> str:
    versions = served()
    if not versions:
        return "install torch first, then ringlet"
    major, minor = versions[-1].split(".")
    return f"pip install 'torch>={versions[0]},<{major}.{int(minor) + 1}'"


def _explanation(torch: str, error: ImportError) -> str:
    versions = served()
    if versions:
        return (
            f"this ringlet is for torch {', '.join(versions)}, and torch {torch} is here. "
            f"Install one that it is for ({_install()}), or a ringlet for torch {torch}"
        )
    if (HERE / NAME).exists():
        return (
            f"ringlet's extension cannot be loaded with torch {torch}, which is here: {error}. "
            "Build ringlet again for this torch: `make extension` in a clone, else pip install it again"
        )
    return (
        f"ringlet has no extension for this Python ({NAME} in {HERE}): "
        "run `make extension` in a clone, or pip install ringlet with this Python"
    )
