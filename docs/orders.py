"""The summation orders that `ringlet reveal` saw: tables of docs/numerics.md, and the picture of docs/reveal.md.

benchmarks/summation_orders.py writes the file that they are read from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringlet.cli.reveal import panels
from ringlet.schedule import draw_trees

FILE = Path(__file__).parent.parent / "benchmarks" / "baselines" / "2026-11-27-summation-orders.jsonl"
BESIDE = ("ringlet reveal gloo -n 4", "ringlet reveal openmpi -n 4")  # the picture's
OWN = "ringlet:"
NAMES = {
    "gloo": "gloo of torch",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "benchmarks.peers.shm_kernels:deepspeed": "DeepSpeed",
    "benchmarks.peers.shm_kernels:vllm": "vLLM",
}

Found = dict[str, Any]


def tables() -> dict[str, dict[str, list[list[str]]]]:
    """Page -> name of a table in it -> lines of cells."""
    found = _read()
    others = [one for one in found if not one["target"].startswith(OWN)]
    own = [one for one in found if one["target"].startswith(OWN)]
    return {"numerics.md": {"revealed libraries": _libraries(others), "revealed algorithms": _algorithms(own)}}


def picture() -> str:
    """Two libraries side by side, as SVG."""
    return draw_trees.svg(panels([one for command in BESIDE for one in _read() if one["command"] == command]))


def _read() -> list[Found]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def _libraries(found: Sequence[Found]) -> list[list[str]]:
    lines = [["library", "command", "trees, from a number of elements on", "roundings", "all ranks' bits"]]
    for one in found:
        version = re.findall(r"\d[\w.]*", one["version"])[0]
        parts = [(1, one["messages"][0]["layouts"]), *((c["elements"], [c]) for c in one["changes"])]
        said = "; ".join(f"{elements:,}: {_trees(one, layouts)}" for elements, layouts in parts)
        depths = sorted({order["depth"] for order in one["orders"]})
        equal = "equal" if all(seen["ranks_equal"] for seen in one["messages"]) else "differ"
        roundings = f"{depths[0]} to {depths[-1]}" if len(depths) > 1 else f"{depths[0]}"
        lines.append([f"{NAMES[one['target']]} {version}", f"`{one['command']}`", said, roundings, equal])
    return lines


def _trees(one: Found, layouts: Sequence[dict[str, Any]]) -> str:
    """One tree as text; of several the number."""
    distinct = {order for layout in layouts for order in layout["orders"]}
    if len(layouts) > 1:
        return f"{len(distinct)} trees by rank"
    return f"{len(distinct)} trees by place" if len(distinct) > 1 else f"`{one['orders'][min(distinct)]['text']}`"


def _algorithms(found: Sequence[Found]) -> list[list[str]]:
    lines = [["algorithm", "collective", "float32", "bfloat16"]]
    for one in found:
        if one["dtype"] == "float32":
            same = [other for other in found if _call(other) == _call(one) and other["dtype"] == "bfloat16"]
            texts = [" ".join(f"`{order['text']}`" for order in each["orders"]) for each in (one, *same)]
            lines.append([f"`{one['target'].removeprefix(OWN)}`", f"`{one['collective']}`", *texts])
    return lines


def _call(one: Found) -> tuple[str, str]:
    return one["target"], one["collective"]
