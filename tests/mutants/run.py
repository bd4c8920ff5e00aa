"""Seeded faults: `run.py [NAME ...] [--full]` puts each into a tree of its own, builds it, and runs the tests that its
patch says find it, or with --full all that `make test` runs.

A patch opens with what is wrong, then a line for each way to find it, "Found by: ctest NAME" or "Found by: pytest
ARGUMENTS"; pytest runs what `make test` runs, and with "Found by test-all: pytest ARGUMENTS" the rest, too. All of them
must pass on the tree without a fault, so that a fault counts as found for its own sake. Keeps what it saw of each in
tests/mutants/results.jsonl, and fails where a fault is not found, or where `make test` finds fewer than nine of ten.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "mutants" / "patches"
RESULTS = ROOT / "tests" / "mutants" / "results.jsonl"
TREE = ROOT / "build" / "mutants"
LOG = TREE / "build" / "mutants.log"
BUILD = TREE / "build" / str(sys.implementation.cache_tag)
FOUND_BY = re.compile(r"^Found by( test-all)?: (ctest|pytest) (.+)$", re.MULTILINE)
# What each prints of a test that failed.
FAILED = {
    "pytest": re.compile(r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[.*?\])?)(?: - |$)", re.MULTILINE),
    "ctest": re.compile(r"^\s+\d+ - (\w+) \((?!Not Run)[\w ]+\)", re.MULTILINE),
}
LEAST_FOUND_BY_MAKE_TEST = 0.9
# A fault may make ranks wait for each other: then the test's own limit finds it, and soon.
PATIENCE = {"RINGLET_TEST_HANG_SECONDS": "40", "RINGLET_TEST_TIMEOUT": "20"}
# C++ tests try the cases that they try in `make test`.
CASES = {"RINGLET_FEW_CASES": "1"}
LIMIT_S = {"ctest": 90, "pytest": 400}


@dataclass(frozen=True)
class Finder:
    """A command that runs tests. `fast`: of `make test`."""

    tool: str
    arguments: str
    fast: bool = True

    @property
    def command(self) -> list[str]:
        if self.tool == "ctest":
            return ["ctest", "--test-dir", str(BUILD), "--output-on-failure", "-R", f"^({self.arguments})$"]
        only = ["-m", "not slow"] if self.fast else []
        return [sys.executable, "-m", "pytest", "-x", *only, *shlex.split(self.arguments)]

    def __str__(self) -> str:
        return f"{self.tool} {self.arguments}"


MAKE_TEST = (Finder("ctest", ".*"), Finder("pytest", "-n 2 --dist worksteal"))


@dataclass(frozen=True)
class Mutant:
    path: pathlib.Path
    what: str
    finders: tuple[Finder, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def files(self) -> list[str]:
        return re.findall(r"(?m)^\+\+\+ b/(\S+)", self.path.read_text())

    @property
    def is_cpp(self) -> bool:
        return any(name.startswith("csrc/") for name in self.files)


@dataclass(frozen=True)
class Result:
    """`found_by`: the command whose tests found it, and `test` the first of them that failed; None: none did."""

    mutant: Mutant
    found_by: Finder | None
    test: str | None
    build_s: float
    test_s: float

    @property
    def line(self) -> dict[str, object]:
        suite = None if self.found_by is None else "make test" if self.found_by.fast else "make test-all"
        command = None if self.found_by is None else str(self.found_by)
        seen = {"fault": self.mutant.name, "what": self.mutant.what, "suite": suite, "command": command}
        return seen | {"test": self.test, "build_s": round(self.build_s), "test_s": round(self.test_s)}


def mutants() -> list[Mutant]:
    """Every patch, by name. Raises ValueError where one does not say what it is and how it is found."""
    found = []
    for path in sorted(PATCHES.glob("*.patch")):
        head = path.read_text().partition("\n--- ")[0]
        finders = tuple(Finder(tool, rest, fast=not slow) for slow, tool, rest in FOUND_BY.findall(head))
        if not finders:
            raise ValueError(f"{path}: no line 'Found by: ctest NAME' or 'Found by: pytest ARGUMENTS'")
        found.append(Mutant(path, head.splitlines()[0], finders))
    return found


def run(command: list[str], limit_s: float | None = None, **variables: str) -> int | None:
    """The exit code of a command in the tree; None where it ran past its limit. Its output goes to a log."""
    environ = os.environ | {"PYTHONPATH": str(TREE / "python")} | variables
    with LOG.open("ab") as log:
        process = subprocess.Popen(command, cwd=TREE, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def git(*arguments: str, cwd: pathlib.Path = ROOT) -> str:
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def own_tree() -> object:
    """A tree has one fault at a time. What is returned must be kept."""
    TREE.parent.mkdir(parents=True, exist_ok=True)
    lock = TREE.with_suffix(".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit("another run.py is at work in this tree") from None
    return lock


def make_tree() -> None:
    """A worktree of git's with what is committed, and over it what is changed or new here."""
    if not (TREE / ".git").exists():
        shutil.rmtree(TREE, ignore_errors=True)
        git("worktree", "prune")
        git("worktree", "add", "--detach", str(TREE), "HEAD")
    git("checkout", "--force", "--detach", git("rev-parse", "HEAD").strip(), cwd=TREE)
    git("clean", "-qfd", cwd=TREE)
    for name in git("ls-files", "-z", "--modified", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
        elif name:
            (TREE / name).unlink(missing_ok=True)
    (TREE / "build").mkdir(exist_ok=True)
    LOG.touch()


def build(finders: Iterable[Finder], is_cpp: bool) -> bool:
    """What the finders need of what is compiled. False: it does not compile."""
    wanted = {finder.tool: finder for finder in finders}
    if not is_cpp:
        for built in (ROOT / "python" / "ringlet").glob("_C*.so"):  # of the same C++
            shutil.copy2(built, TREE / "python" / "ringlet" / built.name)
        return True
    if not (BUILD / "CMakeCache.txt").exists():
        BUILD.mkdir(parents=True)
        # Without the kernels that only nvcc compiles: no test here has a GPU to run them on.
        ninja = [f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}", "-G", "Ninja"] if shutil.which("ninja") else []
        options = ["-DRINGLET_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        if run(["cmake", "-S", str(TREE), "-B", str(BUILD), *options, *ninja]) != 0:
            return False
    if "pytest" in wanted:
        if run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"]) != 0:
            return False
        if run(["cmake", "--build", str(BUILD), "--target", "emulated_device"]) != 0:
            return False
    if "ctest" not in wanted:
        return True
    names = [finder.arguments for finder in finders if finder.tool == "ctest"]
    targets = [["--target", f"{name}_test"] if name.isidentifier() else [] for name in names]
    configured = run(["cmake", "-DRINGLET_TESTING=ON", str(BUILD)]) == 0
    return configured and all(run(["cmake", "--build", str(BUILD), *target]) == 0 for target in targets)


def first_to_find(finders: Iterable[Finder]) -> tuple[Finder | None, str | None]:
    """The first command that fails, and the first test that fails in it."""
    for finder in finders:
        begins = LOG.stat().st_size
        limit = LIMIT_S[finder.tool] if finder != MAKE_TEST[0] else None
        code = run(finder.command, limit, **PATIENCE, **CASES)
        if code == 0:
            continue
        if code is None:
            return finder, f"(did not end in {limit} s)"
        failed = FAILED[finder.tool].search(LOG.read_bytes()[begins:].decode(errors="replace"))
        return finder, failed[1] if failed else f"(exit code {code})"
    return None, None


def examine(mutant: Mutant, finders: tuple[Finder, ...]) -> Result:
    git("apply", str(mutant.path), cwd=TREE)
    try:
        began = time.monotonic()
        if not build(finders, mutant.is_cpp):
            raise SystemExit(f"{mutant.name} does not compile: see {LOG}")
        built = time.monotonic()
        found_by, test = first_to_find(finders)
        return Result(mutant, found_by, test, built - began, time.monotonic() - built)
    finally:
        git("apply", "--reverse", str(mutant.path), cwd=TREE)


def keep(results: list[Result], known: list[Mutant]) -> list[dict[str, object]]:
    """Writes these into RESULTS, over what is there of the same faults; all lines of it."""
    there = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    lines = {line["fault"]: line for line in [*there, *(result.line for result in results)]}
    ordered = [lines[mutant.name] for mutant in known if mutant.name in lines]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in ordered))
    return ordered


def conclude(lines: list[dict[str, object]]) -> int:
    found = sum(line["suite"] is not None for line in lines)
    by_make_test = sum(line["suite"] == "make test" for line in lines)
    print(f"{found} of {len(lines)} faults found, {by_make_test} of them by `make test`")
    return 0 if found == len(lines) and by_make_test >= LEAST_FOUND_BY_MAKE_TEST * len(lines) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    known = mutants()
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--full", action="store_true", help="run all of `make test` on each, not what its patch names")
    parser.add_argument("--seeded-only", action="store_true", help="the tree without a fault is known to pass")
    args = parser.parse_args()
    if unknown := set(args.names) - {mutant.name for mutant in known}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are: {', '.join(m.name for m in known)}")
    chosen = [mutant for mutant in known if not args.names or mutant.name in args.names]
    finders = MAKE_TEST if args.full else tuple(dict.fromkeys(f for mutant in chosen for f in mutant.finders))
    lock = own_tree()  # noqa: F841 (held to the end)
    make_tree()
    if not args.seeded_only:
        print(f"the tree without a fault, {len(finders)} runs", flush=True)
        if not build(finders, is_cpp=any(mutant.is_cpp for mutant in chosen)):
            raise SystemExit(f"does not compile without a fault: see {LOG}")
        wrong, test = first_to_find(finders)
        if wrong:
            raise SystemExit(f"fails without a fault: {wrong}: {test}; see {LOG}")
    lines: list[dict[str, object]] = []
    for mutant in chosen:
        everything = MAKE_TEST if mutant.is_cpp else MAKE_TEST[1:]  # the C++ tests run no Python
        result = examine(mutant, everything if args.full else mutant.finders)
        print(f"{mutant.name}: {result.test or 'NOT FOUND'}, {result.build_s:.0f} + {result.test_s:.0f} s", flush=True)
        lines = keep([result], known)
    return conclude(lines)


if __name__ == "__main__":
    sys.exit(main())
