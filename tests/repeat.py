"""Whether `make test`'s Python tests are ever red without a reason: runs them again and again on a machine that has
other work, beside two busy loops and at nice 19, and says which tests ever failed, and how often. The reports of runs
that failed go to out/repeat/.

    python tests/repeat.py [--runs 20] [--nice-runs 5] [pytest's arguments]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUSY_LOOPS = 2
RED_RUNS = ROOT / "out" / "repeat"
PARTS = (("-n", "2", "--dist", "worksteal", "-m", "not slow and not alone"), ("-m", "not slow and alone"))


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def failed_in(report: pathlib.Path) -> list[str]:
    """Of a run that was cut off there is no report."""
    if not report.exists():
        return ["(the run ended without a report)"]
    cases = ElementTree.parse(report).iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def run_once(arguments: list[str], niceness: int) -> list[str]:
    """What failed."""
    failed = []
    for part in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "report.xml")
            command = ["nice", "-n", str(niceness), sys.executable, "-m", "pytest", f"--junitxml={report}", *part]
            subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
            failed_here = failed_in(report)
            if failed_here and report.exists():
                shutil.copy(report, RED_RUNS / f"{time.strftime('%H%M%S')}.xml")
            failed += failed_here
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="beside two busy loops (default 20)")
    parser.add_argument("--nice-runs", type=int, default=5, help="at nice 19 (default 5)")
    args, rest = parser.parse_known_args()
    ever: collections.Counter[str] = collections.Counter()
    red = 0
    RED_RUNS.mkdir(parents=True, exist_ok=True)
    for number in range(args.runs + args.nice_runs):
        nice = number >= args.runs
        began = time.monotonic()
        with busy(0 if nice else BUSY_LOOPS):
            failed = run_once(rest, 19 if nice else 0)
        ever.update(failed)
        red += bool(failed)
        where = "at nice 19" if nice else f"beside {BUSY_LOOPS} busy loops"
        seconds = time.monotonic() - began
        print(f"run {number + 1} {where}: {len(failed)} failed, {seconds:.0f} s {' '.join(failed)}", flush=True)
    for name, times in ever.most_common():
        print(f"{times:3d} times  {name}")
    print(f"{args.runs + args.nice_runs - red} passed, {red} failed")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
