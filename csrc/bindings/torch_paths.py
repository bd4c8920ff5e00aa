"""Prints torch's include folder, library folder and C++ ABI flag for CMake, without loading libtorch."""

import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit("torch is not importable by this Python; install it first (pip install torch==2.13.0)")
root = pathlib.Path(spec.origin).parent
config = root / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
old_abi = config.exists() and "_GLIBCXX_USE_CXX11_ABI=0" in config.read_text()
print(f"{root / 'include'};{root / 'lib'};{0 if old_abi else 1}")
