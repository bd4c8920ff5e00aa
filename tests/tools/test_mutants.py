"""The seeded faults (tests/mutants) are still faults of this tree: each patch applies, and its tests are there."""

import pathlib
import re

import pytest

from programs import ended, module_at

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = {"base", "schedule", "reduce", "memory", "plan", "transport", "engine", "gpu", "comm", "bindings"}


MUTANTS = module_at(ROOT / "tests" / "mutants" / "run.py").mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_put_in_and_looked_for(mutant):
    done = ended("git", "-c", "safe.directory=*", "apply", "--check", mutant.path, cwd=ROOT)
    assert done.returncode == 0, f"{mutant.files} changed: make the patch again\n{done.stderr}"
    cmake = (ROOT / "CMakeLists.txt").read_text()
    suites = re.search(r"set\(RINGLET_TESTS ([^)]*)\)", cmake)[1].split()
    for finder in mutant.finders:
        named = finder.arguments.split() if finder.tool == "ctest" else re.findall(r"tests/\S+\.py", finder.arguments)
        there = [name in suites if finder.tool == "ctest" else (ROOT / name).exists() for name in named]
        assert there and all(there), f"{mutant.name}: {finder} names tests that are not there"


def test_there_are_faults_in_every_room():
    files = [pathlib.PurePath(name) for mutant in MUTANTS for name in mutant.files]
    assert len(MUTANTS) >= 30
    assert {path.parts[1] for path in files if path.parts[0] == "csrc"} == ROOMS
    assert sum(path.parts[0] == "python" for path in files) >= 8
