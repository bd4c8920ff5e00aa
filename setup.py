"""Hands the build over to CMake, which holds the one source list; pyproject.toml holds everything else."""

import filecmp
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent.resolve()
# One build folder per interpreter, kept, so that a second build compiles only what changed.
BUILD = ROOT / "build" / str(sys.implementation.cache_tag)
# cmake and ninja may have been installed beside this interpreter, whose environment need not be active.
SEARCH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


class CMakeBuild(build_ext):
    def build_extension(self, ext):
        cmake = shutil.which("cmake", path=SEARCH)
        if cmake is None:
            sys.exit("ringlet's build needs CMake >= 3.20 on PATH (pip install cmake)")
        configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), *self._generator()]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release", "-DRINGLET_BINDINGS=ON"]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        subprocess.run([cmake, "--build", str(BUILD), "--target", "ringlet_package", "-j", jobs], check=True)
        target = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
        for built, place in (
            (BUILD / target.name, target),
            (BUILD / "libringlet_cuda.so", target.with_name("libringlet_cuda.so")),
        ):
            if built.exists():
                replace(built, place)
            else:
                place.unlink(missing_ok=True)  # built by an earlier nvcc, which is gone

    def copy_extensions_to_source(self):
        for built in pathlib.Path(self.build_lib, "ringlet").glob("*.so"):
            replace(built, ROOT / "python" / "ringlet" / built.name)

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


def requirements():
    """An extension runs with the minor version of torch that it was compiled against, and says so in the wheel."""
    try:
        torch = importlib.metadata.version("torch").split(".")
        return ["numpy", f"torch=={torch[0]}.{torch[1]}.*"]
    except importlib.metadata.PackageNotFoundError:
        return ["numpy", "torch>=2.11,<2.16"]


setup(
    install_requires=requirements(),
    # Not in pyproject.toml, where setuptools before 77 and from 2027 on disagree on its form.
    license="Apache-2.0",
    ext_modules=[Extension("ringlet._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
