"""`make wheel` makes a wheel that installs and runs where there is torch and numpy, and no compiler."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import pytest

import ringlet

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST_PROGRAM = re.compile(r"^```python run file\n(.*?)^```\n+```text output\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("auditwheel") is None, reason="needs auditwheel, which `make wheel` installs"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(["make", "wheel", f"DIST={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


def with_requirements(*names):
    """The distributions that these need, these included, by name."""
    found = {}
    wanted = list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or an extra
        needs = [need for need in found[name].requires or () if "extra ==" not in need]
        wanted += [re.match(r"[\w.-]+", need)[0] for need in needs]
    return found


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory):
    """An environment with torch and numpy, and nothing else of this one; its folder."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in with_requirements("torch", "numpy").values():
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            there = pathlib.Path(distribution.locate_file(top))
            if there.exists() and not (packages / top).exists():
                (packages / top).symlink_to(there)
    return folder


def run(folder, *words, **options):
    """In the environment, with nothing but its programs on PATH."""
    path = str(folder / "bin")
    assert not any(shutil.which(compiler, path=path) for compiler in ("cc", "c++", "g++", "clang", "cmake", "ninja"))
    clean = {"PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": ""}
    program = [str(folder / "bin" / words[0]), *words[1:]]
    done = subprocess.run(program, env=clean, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_is_a_manylinux_one(wheel):
    """auditwheel's own judgement: it looks at the versions of every symbol, and at what is linked."""
    auditwheel = [str(pathlib.Path(sys.executable).with_name("auditwheel")), "show", str(wheel)]
    told = subprocess.run(auditwheel, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}).stdout
    tag = re.search(r"manylinux_\d+_\d+_\w+", wheel.name)
    assert tag and tag[0] in told, told


def test_the_first_program_runs_without_a_compiler(wheel, empty_environment, tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(empty_environment / "bin" / "python"),
    ]
    done = subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", str(wheel)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = run(empty_environment, "python", "-c", "import ringlet; print(ringlet.__file__)", cwd=tmp_path)
    assert told.startswith(str(empty_environment)), "another ringlet"
    code, output = FIRST_PROGRAM.search((ROOT / "README.md").read_text(encoding="utf-8")).groups()
    (tmp_path / "first.py").write_text(code, encoding="utf-8")
    lines = run(empty_environment, "python", "first.py", cwd=tmp_path).splitlines()
    assert sorted(lines) == sorted(output.splitlines())
    assert run(empty_environment, "ringlet", "version").startswith(f"ringlet {ringlet.__version__}, torch ")
    (packages,) = empty_environment.glob("lib/python*/site-packages")
    torch = ".".join(importlib.metadata.version("torch").split(".")[:2])
    needs = run(empty_environment, "python", "-c", "import importlib.metadata as m; print(m.requires('ringlet'))")
    assert f"'torch=={torch}.*'" in needs and "'numpy'" in needs, "an extension is of one minor version of torch"
    held = {path.name for path in (packages / "ringlet").iterdir()}
    assert {"py.typed", "_C.pyi"} <= held


def test_the_version_is_pyprojects():
    """The metadata, Python, and what C++ was built with."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert ringlet.__version__ == importlib.metadata.version("ringlet") == version
