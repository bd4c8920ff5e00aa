"""The pages are true: pictures and tables are of today's schedules, examples run, links and paths lead somewhere."""

import importlib.util
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

import ringlet

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN, RUN_FILE = "python run", "python run file"  # in this process; as a program of its own


def load_generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(kind):
    """(page and number, code, what the block after it says the output is) of every fenced block of a kind."""
    found = []
    for page in PAGES:
        fenced = FENCE.findall(page.read_text(encoding="utf-8"))
        for number, (info, code) in enumerate(fenced):
            following = fenced[number + 1] if number + 1 < len(fenced) else ("", "")
            output = following[1] if following[0] == "text output" else None
            if info == kind:
                found.append(pytest.param(code, output, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def test_pictures_are_those_of_the_schedules():
    drawn = load_generate().pictures()
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    stale = [name for name in drawn.keys() | committed.keys() if drawn.get(name) != committed.get(name)]
    assert not stale, f"run `python docs/generate.py`: {sorted(stale)}"


def test_tables_are_those_of_the_prover_and_the_source():
    generate = load_generate()
    for name, tables in generate.tables().items():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert generate.with_tables(page, tables) == page, "run `python docs/generate.py`"


def test_every_algorithm_has_its_picture_in_the_page():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for algorithm, collective, _ in ringlet.schedule.algorithms():
        assert f"(pictures/{collective}-{algorithm}.svg)" in page


@pytest.mark.parametrize("code, output", blocks(RUN))
def test_example_runs_here(code, output, capsys):
    try:
        exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
    finally:
        ringlet.finalize()
    if output is not None:
        assert sorted(capsys.readouterr().out.splitlines()) == sorted(output.splitlines())


@pytest.mark.parametrize("code, output", blocks(RUN_FILE))
def test_example_runs_as_a_program(code, output, tmp_path):
    program = tmp_path / "example.py"
    program.write_text(code, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # as torchrun sets
    environment = {**os.environ, **alone, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if output is not None:  # ranks print in any order
        assert sorted(done.stdout.splitlines()) == sorted(output.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    broken = []
    for target in targets:
        path, _, heading = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (heading and heading not in headings(there)):
            broken.append(target)
    assert not broken


def headings(page):
    """The anchors that a page's headings get."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_readmes_map_is_of_this_tree():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (tree,) = [code for info, code in FENCE.findall(page) if info == "text map"]
    folder, missing = ROOT, []
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name if name.endswith("/") else ROOT
            path = ROOT / name
        else:
            path = folder / name
        if not path.exists():
            missing.append(line)
    assert not missing
