"""Builds the site: the pages of this repository and the reference of the Python API, with search.

    make site          (or: python docs/site/build.py out/site)

The pages are copied in the repository's layout, so that links between them stay. A link to another file leads to a copy
of it as text; a link to a folder becomes plain words. mkdocs runs with every warning as an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SHOWN = {".md", ".svg", ".png"}  # what a site shows as it is


def pages() -> list[Path]:
    """Every page, relative to the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
    return sorted(page.relative_to(ROOT) for page in found)


def rewritten(page: Path, text: str, linked: set[Path]) -> str:
    """The page for mkdocs; adds the files that it shows or links to, relative to the root."""

    def link(found: re.Match[str]) -> str:
        words, target, heading = found[1], found[2], found[3] or ""
        words = LINK.sub(link, words)
        if re.match(r"\w+:", target):
            return found[0]
        there = Path(os.path.normpath(page.parent / target))
        if (ROOT / there).is_dir():
            return words
        linked.add(there)
        return f"[{words}]({target}{heading})" if there.suffix in SHOWN else f"[{words}]({target}.txt)"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    # mkdocs takes one word after a fence; the others are for tests/tools/test_docs.py.
    parts[1::2] = [re.sub(r"\A```(\w*)[^\n]*", r"```\1", part) for part in parts[1::2]]
    return "".join(parts)


def lay_out(folder: Path) -> None:
    linked: set[Path] = set()
    for page in pages():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        text = rewritten(page, (ROOT / page).read_text(encoding="utf-8"), linked)
        (folder / page).write_text(text, encoding="utf-8")
    for file in sorted(linked - set(pages())):
        copy = folder / (file if file.suffix in SHOWN else f"{file}.txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy)


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        given = {
            "RINGLET_SITE_PAGES": folder,
            "RINGLET_SITE": str(site),
            "RINGLET_SITE_PYTHON": str(ROOT / "python"),
            "NO_MKDOCS_2_WARNING": "1",
        }
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", "docs/site/mkdocs.yml"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | given, check=False)
    if done.returncode == 0:
        print(f"{site}/index.html (for the search: python -m http.server -d {site})")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
