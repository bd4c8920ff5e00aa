"""One self-contained HTML page in which schedules move: `ringlet explore`.

Python executes the schedules, and the page holds the frames (`embed`): its scripts only draw them. It needs no network:
style, scripts and data stand in the file, and its content security policy forbids requests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringlet import _C

_ASSETS = Path(__file__).parent
# In the order of the page's one script: a definition stands before its use.
SCRIPTS = ("data", "words", "svg", "stage", "player", "page")


def page(catalogue: dict[str, Any], revealed: str = "") -> str:
    """The page as HTML; `catalogue` comes from `embed.catalogue`. revealed: an SVG, shown below."""
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    # Inside a script element only "</" could end it early.
    data = json.dumps({"version": _C.build_info()["ringlet"], **catalogue}, separators=(",", ":")).replace("</", "<\\/")
    filled = _asset("page.html")
    seen = f'<div class="scrolls revealed">{revealed}</div>' if revealed else ""
    for name, text in (("style", _asset("style.css")), ("revealed", seen), ("data", data), ("scripts", scripts)):
        before, mark, after = filled.partition(f"[[{name}]]")
        assert mark, f"page.html has no place for the {name}"
        filled = f"{before}{text}{after}"
    return filled


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
