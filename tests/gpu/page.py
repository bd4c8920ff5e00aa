"""The page that a GPU check writes: what it ran on, what it was to show and did, and what every part said."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from goals import goals, met
from parts import ROOT, Logs, Part

HEAD, TAIL = 60, 140  # lines of a log that is longer than both
WIDTH = 500  # characters of a line
TELLING = ("NCCL_", "CUDA_", "RINGLET_")  # variables that say how a part was run

NOTE = """\
Written by `make gpu-check` (tests/gpu/check.py), anew after every part.

All ranks share one GPU (loopback): nothing here says anything about links between GPUs. Virtual ranks are streams of
one process and run side by side; ranks as processes take turns on the GPU, in time slices of some milliseconds."""


@dataclass
class Page:
    """facts: what it ran on. parts: all there are, run now or not. not_run: why some were not, though asked for."""

    device: str
    date: str
    facts: list[tuple[str, str]]
    parts: list[Part]
    logs: Logs
    when: str = ""
    not_run: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        judged = [(goal.what, *goal.verdict(self.logs)) for goal in goals()]
        lines = [f"# GPU check on {self.device}, {self.date}", "", NOTE]
        lines += ["", *table(["", ""], [list(fact) for fact in self.facts])]
        lines += ["", "## What must be shown", ""]
        lines += table(
            ["what must be shown", "figure", "met"], [[what, told, met(right)] for what, told, right in judged]
        )
        lines += ["", "## Parts", ""]
        lines += table(["part", "outcome", "seconds", "run"], [self._row(part) for part in self.parts])
        lines += ["", *table(["parts", "variables"], environments(self.parts))]
        for part in self.parts:
            lines += ["", f"## {part.name}", "", *self._log(part)]
        return without_paths("\n".join(lines) + "\n")

    def _row(self, part: Part) -> list[str]:
        record, why = self.logs.record(part.name), self.not_run.get(part.name)
        if record is None:
            return [part.name, f"not run: {why}" if why else "not run", "", ""]
        now = record.when == self.when
        earlier = "" if now else f"{record.when}, commit {record.commit}"
        outcome = f"{'' if now else 'earlier: '}{record.outcome}"
        return [part.name, f"not run: {why}; {outcome}" if why else outcome, f"{record.seconds:g}", earlier or "now"]

    def _log(self, part: Part) -> list[str]:
        text = self.logs.text(part.name).strip("\n")
        return ["```", *shortened(text), "```"] if text else ["No log."]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(heads), "|" + "---|" * len(heads), *map(line, rows)]


def environments(parts: list[Part]) -> list[list[str]]:
    """Which parts ran with which variables, those with the same together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        told = sorted(f"{name}={value}" for name, value in part.environment.items() if name.startswith(TELLING))
        groups[" ".join(told) or "none of their own"].append(part.name)
    return [[", ".join(names), told] for told, names in groups.items()]


def shortened(text: str) -> list[str]:
    """The lines of a log's beginning and end, so that they can stand in a fence of a page whose links are checked."""
    lines = text.splitlines()
    if len(lines) > HEAD + TAIL:
        left_out = len(lines) - HEAD - TAIL
        lines = [*lines[:HEAD], f"... {left_out} lines left out ...", *lines[-TAIL:]]
    return [line[:WIDTH].rstrip().replace("```", "'''").replace("](", "] (") for line in lines]


def without_paths(text: str) -> str:
    """Where the repository lay is nobody's matter: paths in it are told from its root, homes are left out."""
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    return re.sub(r"(?<![\w.}/])/(?:root|home)/(?:[^\s/:,;'\"]+/)*", ".../", text)


def write(path: Path, text: str) -> None:
    """Whole or not at all: who reads it meanwhile sees the page of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8", errors="replace")
    os.replace(fresh, path)
