"""Runs torch's own suite for process-group backends (`DistributedTest._DistTestBase`, in torch's wheel) on a backend.

    python tests/conformance/run.py                             ringlet at worlds 2, 4 and 8, compared with gloo
    python tests/conformance/run.py --backend gloo --store      measure the reference anew
    python tests/conformance/run.py --world 2 --tests gather,barrier

Rows go to out/conformance-BACKEND-WORLD.jsonl, what the ranks print to the .log beside it. Exit status 1: a test
failed, or was skipped where gloo passes. Needs the package expecttest: pip install 'ringlet[conformance]'.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import results

ALL_WORLDS = "2,4,8"
TEST_SECONDS = 120
ONE_WORLD = Path(__file__).with_name("one_world.py")
STORES = {"gloo": results.REFERENCE, "ringlet": results.RESULTS}
SIGNS = {"ok": "ok  ", "skipped": "skip", "failed": "FAIL"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ringlet", help="its module is imported unless torch has it")
    parser.add_argument("--world", default=ALL_WORLDS, metavar="N[,N]", help=f"ranks (default {ALL_WORLDS})")
    parser.add_argument("--tests", default="", metavar="A,B", help="only tests whose names hold one of these")
    parser.add_argument("--start", default="fork", choices=("fork", "spawn"), help="how ranks begin (default fork)")
    parser.add_argument(
        "--output", type=Path, default=Path("out"), metavar="DIR", help="for rows and logs (default out)"
    )
    parser.add_argument("--measure-gloo", action="store_true", help="compare with a run of gloo, not with stored rows")
    parser.add_argument("--store", action="store_true", help="keep all rows beside this file, for docs/conformance.md")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the skipped tests too")
    chosen = parser.parse_args()
    chosen.worlds = [int(world) for world in chosen.world.split(",")]
    if chosen.store and chosen.backend not in STORES:
        parser.error(f"--store keeps results of {', '.join(STORES)}")
    if chosen.store and (chosen.tests or chosen.world != ALL_WORLDS):
        parser.error("--store keeps whole results: all tests, all worlds")
    return chosen


def environment(chosen: argparse.Namespace, backend: str, world: int, folder: str) -> dict[str, str]:
    """What the suite reads while it is imported, and what keeps ranks from crowding a machine."""
    (Path(folder) / "barrier").mkdir()
    return {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": str(world),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/again",  # of a test that initializes a second time
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
        "START_METHOD": chosen.start,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_world(chosen: argparse.Namespace, backend: str, world: int) -> list[results.Row]:
    """One world's rows: decorators of the suite are evaluated at its import, so a world has a process of its own."""
    chosen.output.mkdir(parents=True, exist_ok=True)
    stem = f"conformance-{backend}-{world}"
    rows: list[results.Row] = []
    reading, writing = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="conformance-") as folder,
        open(chosen.output / f"{stem}.log", "w") as log,
        open(chosen.output / f"{stem}.jsonl", "w") as file,
        open(reading) as lines,
    ):
        command = [sys.executable, str(ONE_WORLD), str(writing), *filter(None, chosen.tests.split(","))]
        settings = environment(chosen, backend, world, folder)
        process = subprocess.Popen(command, env=settings, stdout=log, stderr=log, pass_fds=(writing,))
        os.close(writing)
        for line in lines:
            file.write(line)
            file.flush()
            rows.append(row := json.loads(line))
            if chosen.verbose or row["outcome"] != "skipped":
                print(
                    f"{SIGNS[row['outcome']]} {row['seconds']:6.1f} s  world {world}  {row['test']}  {row['why']}",
                    flush=True,
                )
        if process.wait():
            sys.exit(f"the suite ended with status {process.returncode}; see {log.name}")
    return rows


def run(chosen: argparse.Namespace, backend: str) -> list[results.Row]:
    """All worlds' rows, and their counts for people."""
    rows = [row for world in chosen.worlds for row in run_world(chosen, backend, world)]
    for world in chosen.worlds:
        counts = collections.Counter(row["outcome"] for row in rows if row["world"] == world)
        spent = sum(row["seconds"] for row in rows if row["world"] == world)
        print(f"{backend}, world {world}: {dict(counts)} in {spent:.0f} s")
    return rows


def main() -> int:
    chosen = arguments()
    rows = run(chosen, chosen.backend)
    if chosen.store:
        results.write(STORES[chosen.backend], rows)
    if chosen.backend == "gloo":
        return 0  # it is what it is
    reference = run(chosen, "gloo") if chosen.measure_gloo else results.read(results.REFERENCE)
    found = results.shortcomings(rows, reference)
    print("\n".join(["", *found, f"{len(found)} shortcomings"]))
    return 1 if found or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
