"""Fetches what an extension for another torch is compiled against: fetch_torch.py VERSION FOLDER, for example 2.11.

FOLDER/torch is then this Python's torch, if that has this version. Else it has the headers and the three libraries that
an extension links, of the newest torch of this version that pip finds. A FOLDER that has them is left as it is.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

import torch_paths

WANTED = re.compile(
    r"torch/(include/.*|lib/lib(c10|torch_cpu|torch_python)\.so|share/cmake/Torch/TorchConfig\.cmake|version\.py)"
)


def main() -> None:
    version, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if (folder / "torch" / "version.py").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    own = torch_paths.own()
    if own is not None and ".".join(map(str, torch_paths.minor(own))) == version:
        (folder / "torch").symlink_to(own / "torch")
        return
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", "-d", temporary, f"torch=={version}.*"], check=True)
        (wheel,) = pathlib.Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if WANTED.fullmatch(name)]
            # Last, because it says that the rest is there.
            archive.extractall(folder, sorted(members, key=lambda name: name == "torch/version.py"))


if __name__ == "__main__":
    main()
