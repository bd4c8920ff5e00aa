"""Hands the build over to CMake, which holds the one source list; pyproject.toml holds everything else."""

import filecmp
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc" / "bindings"))
import torch_paths  # noqa: E402

# A wheel has an extension for each torch of these folders; by default, and in a clone, for the one of this Python.
TORCHES = [pathlib.Path(each) for each in os.environ.get("RINGLET_TORCHES", "").split(os.pathsep) if each]
# One build folder per interpreter, kept, so that a second build compiles only what changed.
BUILD = ROOT / "build" / str(sys.implementation.cache_tag)
# cmake and ninja may have been installed beside this interpreter, whose environment need not be active.
SEARCH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


CUDA = "libringlet_cuda.so"


class CMakeBuild(build_ext):
    def build_extension(self, ext):
        cmake = shutil.which("cmake", path=SEARCH)
        if cmake is None:
            sys.exit("ringlet's build needs CMake >= 3.20 on PATH (pip install cmake)")
        configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), *self._generator()]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release", "-DRINGLET_BINDINGS=ON"]
        configure.append(f"-DRINGLET_TORCHES={';'.join(map(str, TORCHES))}")
        if os.environ.get("CUDACXX"):  # CMake asks only in a new folder
            configure.append(f"-DCMAKE_CUDA_COMPILER={os.environ['CUDACXX']}")
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        subprocess.run([cmake, "--build", str(BUILD), "--target", "ringlet_package", "-j", jobs], check=True)
        package = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve().parent
        for old in package.rglob("*.so"):  # of another torch, or by an nvcc that is gone
            old.unlink()
        for folder in folders():
            replace(BUILD / folder / self._name(), package / folder / self._name())
        if (BUILD / CUDA).exists():
            replace(BUILD / CUDA, package / CUDA)

    def copy_extensions_to_source(self):
        """In a clone the extension stands beside the Python files, and needs no other file but the GPU's library."""
        source = ROOT / "python" / "ringlet"
        (folder,) = folders()
        replace(BUILD / folder / self._name(), source / self._name())
        if (BUILD / CUDA).exists():
            replace(BUILD / CUDA, source / CUDA)
        else:
            (source / CUDA).unlink(missing_ok=True)

    def _name(self):
        return pathlib.Path(self.get_ext_filename("ringlet._C")).name

    def _generator(self):
        """CMake remembers the generator that a folder was made with; a new one gets ninja where it is there."""
        ninja = shutil.which("ninja", path=SEARCH)
        if (BUILD / "Makefile").exists() or ninja is None:
            return []
        return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]


def replace(built, place):
    """Never writes into a library that a running process has mapped: that would crash it."""
    if place.exists() and filecmp.cmp(built, place, shallow=False):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.copy2(built, fresh)
    os.replace(fresh, place)


def minors():
    """Of each torch that the extension is built for; none where there is no torch."""
    own = torch_paths.own()
    return [torch_paths.minor(folder) for folder in TORCHES or ([own] if own else [])]


def folders():
    return ["torch_{}_{}".format(*minor) for minor in minors()]


def requirements():
    """A wheel runs with the minor versions of torch that its extensions were compiled against."""
    line = re.search(r"(?m)^torch = (.*)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    supported = [(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", line)]
    # What sources need is known when somebody builds them.
    built = [] if "sdist" in sys.argv else minors()
    first, last = min(built or supported), max(built or supported)
    between = [each for each in supported if built and first < each < last and each not in built]
    without = "".join(f",!={major}.{minor}.*" for major, minor in between)
    return ["numpy", f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}{without}"]


setup(
    install_requires=requirements(),
    # Not in pyproject.toml, where setuptools before 77 and from 2027 on disagree on its form.
    license="Apache-2.0",
    ext_modules=[Extension("ringlet._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
