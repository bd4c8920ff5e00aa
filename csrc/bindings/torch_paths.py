"""Finds torch's include folder, library folder and C++ ABI flag for CMake and setup.py, without loading libtorch.

Arguments: folders that hold a torch each; none: the torch of this Python. Prints a line for each torch, with | between
its version (2_13), include folder, library folder and ABI flag.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
import sysconfig


def own() -> pathlib.Path | None:
    """The folder that holds this Python's torch, also where pip's isolated build hides it from `import`; None: none."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return pathlib.Path(spec.origin).parents[1]
    for scheme in ("purelib", "platlib"):
        folder = pathlib.Path(sysconfig.get_path(scheme))
        if (folder / "torch" / "version.py").exists():
            return folder
    return None


def minor(folder: pathlib.Path) -> tuple[int, int]:
    """(2, 13) of the torch in a folder."""
    text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = '(\d+)\.(\d+)", text, re.MULTILINE)
    if found is None:
        sys.exit(f"{folder}/torch/version.py has no version")
    return int(found[1]), int(found[2])


def main() -> None:
    folders = [pathlib.Path(given) for given in sys.argv[1:]] or [own()]
    for folder in folders:
        if folder is None:
            sys.exit(
                "ringlet is built against the torch that it will run with, and this Python has none. Install torch "
                "first; if it is installed, give --no-build-isolation to pip"
            )
        torch = (folder / "torch").resolve()
        config = torch / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
        old_abi = config.exists() and "_GLIBCXX_USE_CXX11_ABI=0" in config.read_text()
        name = "_".join(map(str, minor(folder)))
        print(f"{name}|{torch / 'include'}|{torch / 'lib'}|{0 if old_abi else 1}")


if __name__ == "__main__":
    main()
