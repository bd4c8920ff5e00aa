"""benchmarks/page.py: what the programs of benchmarks/ write."""

import argparse
import json
import os
import sys
from importlib.machinery import ModuleSpec

import pytest
from benchmarks import contention, page


@pytest.fixture
def write(monkeypatch):
    """Writes as a program with these options does."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["benchmarks/step.py", *map(str, words)])
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("benchmarks.step", None), raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 0.0, 0.0))
        options = page.parse(argparse.ArgumentParser())
        monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))  # the program's own
        lines = page.markdown_table(("way", "ms"), [("ring", 1.5)], left=1)
        page.write(options, "step", "A step", lines, [{"way": "ring"}, {"way": "swing"}], ranks="2")

    return run


def test_rows_have_their_circumstances_beside_them(write, tmp_path):
    write("--json", tmp_path / "new" / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"way": "ring"}, {"way": "swing"}]
    meta = json.loads((tmp_path / "new" / "rows.meta.json").read_text())
    assert (meta["load_before"], meta["command"]) == (1.25, "python -m benchmarks.step --json rows.jsonl")


def test_a_page_goes_to_a_file_or_into_a_folder(write, tmp_path):
    write("--report", tmp_path)
    (in_folder,) = tmp_path.iterdir()
    write("--report", tmp_path / "page.md")
    assert in_folder.name.endswith("-step.md")
    for file in (in_folder, tmp_path / "page.md"):
        lines = file.read_text().splitlines()
        assert lines[0].startswith("# A step on ") and "| load average before | 1.25 |" in lines
        assert "| ranks | 2 |" in lines and lines[-3:] == ["| way | ms |", "| --- | ---: |", "| ring | 1.5 |"]


def test_contention_takes_sizes_with_and_without_a_unit(monkeypatch):
    sizes = []
    monkeypatch.setattr(contention, "CLUSTERS", ("4x2-block",))
    monkeypatch.setattr(contention, "measure", lambda name, ordered, options: (sizes.append(options.size) or [], None))
    for words in ((), ("--size", "4194304"), ("--size", "4M")):
        monkeypatch.setattr(sys, "argv", ["benchmarks/contention.py", *words])
        contention.main()
    assert sizes == [4 << 20] * 6
