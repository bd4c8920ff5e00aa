"""Runs the suite in this process's backend and world (suite.py), and writes a row a test to a file descriptor.

python one_world.py FD [PART OF A NAME]...
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unittest

import torch

import gates
import suite

# The last line of a rank's traceback; not the harness's own, which only says that a rank had one.
RAISED = re.compile(r"(?!RuntimeError: Process \d)[\w.]*(Error|Exception|Timeout|PeerLost|InvalidUsage)\b.*: ")


def reason_of(result: unittest.TestResult) -> tuple[str, str]:
    """(outcome, why)"""
    for test, text in result.failures + result.errors:
        print(f"== {test}\n{text}", flush=True)
        told = [line for line in text.splitlines() if RAISED.match(line)]
        return "failed", (told or text.strip().splitlines())[-1][:300]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "ok", ""


def run(name: str) -> dict[str, object]:
    print(f"== {name}", flush=True)
    start, result = time.monotonic(), unittest.TestResult()
    unittest.TestSuite([suite.Conformance(name)]).run(result)
    outcome, why = reason_of(result)
    return {
        "test": name,
        "backend": suite.BACKEND,
        "world": int(os.environ["WORLD_SIZE"]),
        "outcome": outcome,
        "why": why,
        "kept_out": getattr(getattr(suite.Conformance, name), gates.NOTE, None),
        "torch": torch.__version__.split("+")[0],
        "seconds": round(time.monotonic() - start, 2),
    }


def main(arguments: list[str]) -> None:
    parts = arguments[1:]
    with open(int(arguments[0]), "w") as rows:
        for name in unittest.TestLoader().getTestCaseNames(suite.Conformance):
            if not parts or any(part in name for part in parts):
                print(json.dumps(run(name)), file=rows, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
