"""`make wheel` makes a wheel that installs and runs where there is torch and numpy, and no compiler.

`make sdist` makes an archive that builds. Besides the torch that is here, `make test-wheel` tries the oldest, the
newest, and the archive.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tarfile
import venv

import pytest

import ringlet
from programs import printed

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST_PROGRAM = re.compile(r"^```python run file\n(.*?)^```\n+```text output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
VERSION = re.search(r'(?m)^version = "(.+)"$', PROJECT)[1]
SUPPORTED = re.findall(r"\d+\.\d+", re.search(r"(?m)^torch = (.*)$", PROJECT)[1])
HERE = ".".join(importlib.metadata.version("torch").split(".")[:2])
ALL = "RINGLET_TEST_NO_SKIPS" in os.environ
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

KNOWN = ("--cached", "--others", "--exclude-standard")  # what git has or would take

needs_auditwheel = pytest.mark.skipif(
    importlib.util.find_spec("auditwheel") is None, reason="needs auditwheel, which `make wheel` installs"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    printed("make", "wheel", f"DIST={folder}", *([] if ALL else ["TORCHES="]), cwd=ROOT, timeout=1800)
    (made,) = folder.glob("*.whl")
    return made


def with_requirements(paths, *names):
    """The distributions in these folders that these need, these included, by name."""
    there = {}
    for distribution in importlib.metadata.distributions(path=paths):
        there.setdefault(re.sub(r"[-_.]+", "-", distribution.name).lower(), distribution)
    found = {}
    wanted = list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found or name not in there:  # which is for another system, or an extra
            continue
        found[name] = there[name]
        needs = [need for need in found[name].requires or () if "extra ==" not in need]
        wanted += [re.match(r"[\w.-]+", need)[0] for need in needs]
    return found


@pytest.fixture(scope="module", params=dict.fromkeys([HERE, SUPPORTED[0], SUPPORTED[-1]]))
def empty_environment(request, tmp_path_factory):
    """An environment with this torch and numpy, and nothing else; its folder."""
    paths = sys.path
    if request.param != HERE:
        paths = [str(path) for path in ROOT.glob(f".venv-torch-{request.param}/lib/python*/site-packages")]
        if not (paths and ALL):
            pytest.skip(f"`make test-wheel` installs torch {request.param}, and tries it")
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in with_requirements(paths, "torch", "numpy").values():
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
    return printed(*program, env=clean, timeout=300, **options)


def check_the_first_program(environment, folder):
    told = run(environment, "python", "-c", "import ringlet; print(ringlet.__file__)", cwd=folder)
    assert told.startswith(str(environment)), "another ringlet"
    code, output = FIRST_PROGRAM.search((ROOT / "README.md").read_text(encoding="utf-8")).groups()
    (folder / "first.py").write_text(code, encoding="utf-8")
    lines = run(environment, "python", "first.py", cwd=folder).splitlines()
    assert sorted(lines) == sorted(output.splitlines())


@needs_auditwheel
def test_the_wheel_is_a_manylinux_one(wheel):
    """auditwheel's own judgement: it looks at the versions of every symbol, and at what is linked."""
    auditwheel = pathlib.Path(sys.executable).with_name("auditwheel")
    told = printed(auditwheel, "show", wheel, env=os.environ | {"COLUMNS": "200"})
    tag = re.search(r"manylinux_\d+_\d+_\w+", wheel.name)
    assert tag and tag[0] in told, told


@needs_auditwheel
def test_the_wheel_serves_each_torch_without_a_compiler(wheel, empty_environment, tmp_path):
    python = empty_environment / "bin" / "python"
    printed(*PIP, "--python", python, "install", "--no-index", "--no-deps", wheel)
    check_the_first_program(empty_environment, tmp_path)
    assert run(empty_environment, "ringlet", "version").startswith(f"ringlet {VERSION}, torch ")
    served = SUPPORTED if ALL else [HERE]
    needs = run(empty_environment, "python", "-c", "import importlib.metadata as m; print(m.requires('ringlet'))")
    major, minor = served[-1].split(".")
    assert f"'torch<{major}.{int(minor) + 1},>={served[0]}'" in needs and "'numpy'" in needs
    (packages,) = empty_environment.glob("lib/python*/site-packages")
    held = {path.name for path in (packages / "ringlet").iterdir()}
    assert {"py.typed", "_C.pyi", *(f"torch_{version.replace('.', '_')}" for version in served)} <= held
    assert not any(name.startswith("_C.cpython") for name in held), "one that would be taken with any torch"
    # As if a torch were here that it does not serve.
    another = (
        "import torch; torch.__version__ = '2.10.1'\ntry: import ringlet\nexcept ImportError as error: print(error)"
    )
    told = run(empty_environment, "python", "-c", another)
    assert f"for torch {', '.join(served)}, and torch 2.10.1 is here" in told and "pip install 'torch>=" in told


def test_an_extension_of_another_torch_is_refused():
    """In a clone, after torch was updated."""
    another = (
        "import torch; torch.__version__ = '2.10.1'\ntry: import ringlet\nexcept ImportError as error: print(error)"
    )
    told = printed(sys.executable, "-c", another)
    assert f"cannot be loaded with torch 2.10.1, which is here: it was built for torch {HERE}" in told
    assert "make extension" in told


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    printed("make", "sdist", f"DIST={folder}", cwd=ROOT)
    return folder / f"ringlet-{VERSION}.tar.gz"


def test_the_sources_are_whats_tracked(sources):
    with tarfile.open(sources) as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    tracked = set(printed("git", "-c", "safe.directory=*", "ls-files", *KNOWN, cwd=ROOT).splitlines())
    made = {name for name in held if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert held - made == {name for name in tracked if (ROOT / name).exists()}


@pytest.mark.skipif(not ALL, reason="`make test-wheel` tries it: all is compiled anew, which takes 10 minutes")
def test_the_sources_build_where_torch_is(sources, tmp_path):
    """As a user installs them: pip's isolated build finds the torch of the environment that it installs into."""
    environment = ROOT / f".venv-torch-{SUPPORTED[-1]}"
    printed(
        environment / "bin" / "python", "-m", "pip", "install", "--force-reinstall", "--no-deps", sources, timeout=3000
    )
    check_the_first_program(environment, tmp_path)


def test_the_version_is_pyprojects():
    """The metadata, Python, what C++ was built with, and the changelog's newest section."""
    assert ringlet.__version__ == importlib.metadata.version("ringlet") == VERSION
    sections = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert re.fullmatch(rf"{re.escape(VERSION)}(, \d{{4}}-\d\d-\d\d| \(not released yet\))", sections[0])
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, \d{4}-\d\d-\d\d", section) for section in sections[1:])


def test_the_pages_name_the_versions_of_torch():
    """The table in docs/start.md, and what CI tries."""
    table = re.findall(r"(?m)^\| (\d+\.\d+) \|", (ROOT / "docs" / "start.md").read_text(encoding="utf-8"))
    assert table == SUPPORTED
    tried = re.search(r"torch: \[(.+)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))[1]
    assert {SUPPORTED[0], SUPPORTED[-1]} <= {version.rpartition(".")[0] for version in re.findall(r"[\d.]+", tried)}
