"""Hands the build over to CMake, which holds the one source list; pyproject.toml holds everything else."""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext):
        target = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
        # One build folder per interpreter, kept, so that a second build compiles only what changed.
        build = ROOT / "build" / f"{sys.implementation.cache_tag}"
        # CMake remembers the generator a folder was made with; ninja is taken where it is.
        generator = ["-G", "Ninja"] if shutil.which("ninja") and not (build / "Makefile").exists() else []
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), *generator]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release", "-DRINGLET_BINDINGS=ON"]
        subprocess.run(configure, check=True)
        jobs = str(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--target", "_C", "-j", jobs], check=True)
        built = next(build.glob("_C*.so"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)


setup(ext_modules=[Extension("ringlet._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
