"""Line and branch coverage of csrc and python, for each suite of tests and for all of them: `make coverage`.

    python tests/measure_coverage.py [--tree FOLDER] [--fast] [--again SUITE] [--results FILE] [pytest's arguments]

Builds the tracked files of --tree (this repository) once more in out/coverage/tree, with gcov's counters. Runs there
first the C++ tests, then each folder of tests/ that has Python tests; children of tests are measured, too. A process
that a test kills does not write its counters of C++. C++ is compiled without optimizing: what an optimizer inlines and
unrolls has branches that the source does not have. Only the kernels, whose tests would take too long, are optimized a
little. A template's line counts once. The row of the C++ tests leaves out csrc/bindings, for which they would need
torch. --fast leaves out what `make test` leaves out. Tests that fail are counted and shown: the counters slow
everything down, and some tests measure time. --again measures one suite anew in the tree that was built, and takes the
others as they were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / "out" / "coverage"
TREE = WORK / "tree"
BUILD = TREE / "build" / str(sys.implementation.cache_tag)
NOT_HERE = {"gpu", "frameworks", "conformance", "mutants", "support", "cpp"}  # they have commands of their own
SETTINGS = """[run]
branch = true
source = {tree}/python/ringlet
parallel = true
data_file = {data}/python
patch =
    _exit
    fork
    subprocess
"""
# The last -O counts.
COMPILER = """#!/bin/sh
case "$*" in
*csrc/reduce/*|*csrc/cuda/*) exec c++ "$@" -O1 ;;
*) exec c++ "$@" -O0 ;;
esac
"""
# A child that ends by os._exit, as multiprocessing's do, would not write the extension's counters.
WRITES_COUNTERS = "void __gcov_dump(void);\nvoid write_counters(void) { __gcov_dump(); }\n"
AT_EXIT = """
def _write_counters(code, _exit=__import__("os")._exit):
    __import__("ctypes").CDLL(_C.__file__).write_counters()
    _exit(code)


__import__("os")._exit = _write_counters
"""


@dataclass(frozen=True)
class Covered:
    """Percentages of lines and branches. A branch that only an exception takes is not counted."""

    suite: str
    failed: int
    csrc_lines: float
    csrc_branches: float
    python_lines: float
    python_branches: float


def run(*command: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """In the tree, with the tree's package before an installed one."""
    environment = {**os.environ, "PYTHONPATH": str(TREE / "python"), **settings}
    return subprocess.run(
        [str(word) for word in command], cwd=TREE, env=environment, text=True, capture_output=True, check=False
    )


def must(result: subprocess.CompletedProcess[str]) -> str:
    if result.returncode != 0:
        sys.exit(f"{result.args} failed:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return result.stdout


def build(tree: pathlib.Path, targets: list[str]) -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    must(run("git", "init", "-q"))  # some tests ask git for the files
    names = must(subprocess.run(["git", "ls-files"], cwd=tree, text=True, capture_output=True, check=False)).split("\n")
    for name in filter(None, names):
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, TREE / name)
    must(run("git", "add", "-A"))
    (WORK / "counters.c").write_text(WRITES_COUNTERS)
    must(run("cc", "-fPIC", "-c", WORK / "counters.c", "-o", WORK / "counters.o"))
    compiler = WORK / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    counted = {
        "CXX": str(compiler),
        "CXXFLAGS": "--coverage -fprofile-update=atomic",
        "LDFLAGS": f"--coverage {WORK}/counters.o",
    }
    must(run(sys.executable, "setup.py", "build_ext", "--inplace", **counted))
    with (TREE / "python" / "ringlet" / "__init__.py").open("a") as package:
        package.write(AT_EXIT)
    must(run("cmake", "-DRINGLET_TESTING=ON", BUILD))
    for target in ("all", *targets):
        must(run("cmake", "--build", BUILD, "--target", target))


def failed_in(output: str) -> int:
    """Of pytest's and ctest's last lines."""
    return sum(int(number) for number in re.findall(r"(\d+) (?:failed|errors?|tests failed out)\b", output[-2000:]))


def measure(suite: str, pytest: list[str]) -> Covered:
    data = WORK / suite
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    for counters in BUILD.rglob("*.gcda"):
        counters.unlink()
    (data / "settings").write_text(SETTINGS.format(tree=TREE, data=data))
    settings = f"--rcfile={data}/settings"
    failed = 0
    if suite == "cpp":
        output = run("ctest", "--test-dir", BUILD, "-j", 2).stdout
        failed = failed_in(output)
    else:
        for part in (("-n", "2", "-m", "not alone"), ("-m", "alone")):
            words = [*part[:-1], f"{part[-1]} and {pytest[0]}" if pytest[0] else part[-1], *pytest[1:]]
            result = run(
                sys.executable, "-m", "coverage", "run", settings, "-m", "pytest", f"tests/{suite}", *words,
            )  # fmt: skip
            (data / f"{part[-1].replace(' ', '-')}.log").write_text(result.stdout + result.stderr)
            failed += failed_in(result.stdout)
        run(sys.executable, "-m", "coverage", "combine", settings)
    must(
        run(
            sys.executable, "-m", "gcovr", "-r", TREE, "-f", TREE / "csrc", "--exclude-throw-branches",
            "--gcov-ignore-parse-errors", "--merge-mode-functions=merge-use-line-0",
            "--json", data / "csrc.json", BUILD,
        )
    )  # fmt: skip
    row = covered(suite, failed, [data])
    (data / "row.json").write_text(json.dumps(asdict(row)))
    return row


def covered(suite: str, failed: int, folders: list[pathlib.Path]) -> Covered:
    files = [word for folder in folders for word in ("-a", folder / "csrc.json")]
    left_out = ["-e", "(.*/)?csrc/bindings/.*"] if suite == "cpp" else []
    summary = WORK / f"{suite}.json"
    must(
        run(
            sys.executable, "-m", "gcovr", "-r", TREE, *files, *left_out,
            "--json-summary", summary, "--merge-lines", "--merge-mode-functions=merge-use-line-0",
        )
    )  # fmt: skip
    csrc = json.loads(summary.read_text())
    python = {"covered_lines": 0, "num_statements": 1, "covered_branches": 0, "num_branches": 1}
    data = [folder / "python" for folder in folders if (folder / "python").exists()]
    if data:
        settings = WORK / "settings"
        settings.write_text(SETTINGS.format(tree=TREE, data=WORK / "combined"))  # a suite may be called "python"
        (WORK / "combined").mkdir(exist_ok=True)
        run(sys.executable, "-m", "coverage", "combine", "--keep", f"--rcfile={settings}", *data)
        report = WORK / f"{suite}.python.json"
        must(run(sys.executable, "-m", "coverage", "json", "-q", f"--rcfile={settings}", "-o", report))
        python = json.loads(report.read_text())["totals"]
    return Covered(
        suite,
        failed,
        csrc["line_percent"],
        csrc["branch_percent"],
        round(100 * python["covered_lines"] / python["num_statements"], 1),
        round(100 * python["covered_branches"] / python["num_branches"], 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT, help="another checkout to measure")
    parser.add_argument("--targets", nargs="*", default=["emulated_device"], help="what its Python tests need built")
    parser.add_argument("--again", action="append", help="a suite to measure anew")
    parser.add_argument("--fast", action="store_true", help="only what `make test` runs")
    parser.add_argument("--results", type=pathlib.Path, help="JSON lines, one a suite")
    args, rest = parser.parse_known_args()
    if not args.again:
        shutil.rmtree(WORK, ignore_errors=True)
        build(args.tree.resolve(), args.targets)
    python = {file.parent.name for file in (TREE / "tests").glob("*/test_*.py")} - NOT_HERE
    rows = []
    print("suite               failed  csrc lines  branches  python lines  branches")
    for suite in ["cpp", *sorted(python), "all"]:
        if suite == "all":
            row = covered("all", sum(row.failed for row in rows), [WORK / row.suite for row in rows])
        elif args.again and suite not in args.again:
            row = Covered(**json.loads((WORK / suite / "row.json").read_text()))
        else:
            row = measure(suite, ["not slow" if args.fast else "", *rest])
        rows.append(row)
        print(
            f"{row.suite:20s}{row.failed:6d}{row.csrc_lines:12.1f}{row.csrc_branches:10.1f}"
            f"{row.python_lines:14.1f}{row.python_branches:10.1f}",
            flush=True,
        )
    if args.results:
        args.results.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
