"""One self-contained HTML page in which schedules move: `ringlet explore`.

The page holds the schedules themselves, as the core made them (`embed`), and a small JavaScript port of the symbolic
execution and of the cost model, which tests/tools/test_explore.py compares with Python for every schedule of the page.
It needs no network: style, scripts and data stand in the file, and its content security policy forbids requests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringlet import _C

_ASSETS = Path(__file__).parent
# In the order of the page's one script: a definition stands before its use.
SCRIPTS = ("decode", "execute", "cost", "words", "svg", "places", "stage", "tree", "plot", "numbers", "player", "page")


def page(catalogue: dict[str, Any]) -> str:
    """The page as HTML; `catalogue` comes from `embed.catalogue`."""
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    # Inside a script element only "</" could end it early.
    data = json.dumps({"version": _C.build_info()["ringlet"], **catalogue}, separators=(",", ":")).replace("</", "<\\/")
    filled = _asset("page.html")
    for name, text in (("style", _asset("style.css")), ("data", data), ("scripts", scripts)):
        before, mark, after = filled.partition(f"[[{name}]]")
        assert mark, f"page.html has no place for the {name}"
        filled = f"{before}{text}{after}"
    return filled


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
