"""The site's links are right before mkdocs sees them; `make site` runs mkdocs itself, with warnings as errors."""

from __future__ import annotations

import pathlib
import sys

import pytest

from programs import module_at, printed

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_links_to_files_lead_to_copies_and_links_to_folders_are_words():
    build, linked = module_at(ROOT / "docs" / "site" / "build.py"), set()
    page = pathlib.Path("docs/gradients.md")
    text = (
        "[a](../Makefile) [b](../examples) [c](start.md#threads) [![d](pictures/x.svg)](../README.md) [e](https://x/)"
    )
    made = build.rewritten(page, text + "\n```python run file\n[kept](../Makefile)\n```\n", linked)
    assert made.startswith(
        "[a](../Makefile.txt) b [c](start.md#threads) [![d](pictures/x.svg)](../README.md) [e](https"
    )
    assert made.endswith("\n```python\n[kept](../Makefile)\n```\n"), "a block's text is not touched, its marks are"
    assert {path.as_posix() for path in linked} == {"Makefile", "docs/start.md", "docs/pictures/x.svg", "README.md"}


def test_every_page_is_laid_out_with_what_it_links_to(tmp_path):
    build = module_at(ROOT / "docs" / "site" / "build.py")
    build.lay_out(tmp_path)
    assert (tmp_path / "docs" / "start.md").exists() and (tmp_path / "benchmarks" / "results").is_dir()
    assert (tmp_path / "csrc" / "schedule" / "ring.cc.txt").read_text() == (ROOT / "csrc/schedule/ring.cc").read_text()


def test_the_site_has_the_reference_and_a_search(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs, which `make site` installs")
    printed(sys.executable, ROOT / "docs" / "site" / "build.py", tmp_path / "site", timeout=300)
    reference = (tmp_path / "site" / "docs" / "site" / "reference.html").read_text()
    for name in (
        "ringlet.init",
        "ringlet.collectives.all_reduce",
        "ringlet.GradientReducer",
        "ringlet.errors.PeerLost",
    ):
        assert f'id="{name}"' in reference, name
    assert "poisons the group" in (tmp_path / "site" / "search" / "search_index.json").read_text()
