"""The page of a GPU check, from its parts' logs: what it ran on, what must be shown and was, and the end of each log.

A goal is met, not met, or not measured. Where a part failed, a figure in its log may still show that a goal is not met,
and cannot show that it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY_SHARE = 0.90  # of the copy's bandwidth
NCCL_SHARE = 0.8  # of ncclAllReduce's speed
WAYS = ("", " by Ring, LL", " by Ring, LL128")  # of ncclAllReduce beside the pull engine
MIB = 1 << 20
TAIL = 60  # lines of a log on the page

NOTE = """\
Written by `make gpu-check` (tests/gpu/check.py), anew after every part.

All ranks share one GPU (loopback): nothing here says anything about links between GPUs. Virtual ranks are streams of
one process and run side by side; ranks as processes take turns on the GPU, in time slices of some milliseconds."""

TRAINING = [f"training_equals_the_cpu_within_rounding[{wrap}-{way}]"
            for wrap in ("DDP", "reducer") for way in ("nccl", "by_size")]  # fmt: skip
# Tests of tests/gpu/test_cuda.py by goal: the part that runs them, and their names.
TESTED = {
    "the contract through peers' memory, worlds 2 3 4, ranks as threads": (
        "threads",
        [f"the_contract[{world}]" for world in (2, 3, 4)],
    ),
    "a CUDA graph replayed 1000 times through peers' memory": ("processes", ["a_graph_is_replayed[1000-peers]"]),
    "a CUDA graph replayed 1000 times through NCCL": ("messages", ["a_graph_is_replayed[1000-nccl]"]),
    "training as on the CPU, with DDP and the reducer": ("messages", TRAINING),
}


@dataclass(frozen=True)
class Goal:
    """met: None where it was not measured."""

    what: str
    figure: str
    met: bool | None

    def verdict(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "not met"

    def line(self) -> str:
        return f"{self.verdict()}: {self.what}{f': {self.figure}' if self.figure else ''}"


def said(*command: str) -> str:
    """What a short command prints; "" where there is none or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", cwd=ROOT, timeout=20, check=True
        )
        return done.stdout.strip()
    return ""


def commit() -> str:
    """Of the checkout; where there is none, what COMMIT says."""
    git = ("git", "-c", f"safe.directory={ROOT}")
    found = said(*git, "log", "-1", "--format=%h") or os.environ.get("COMMIT", "unknown")
    return found + (
        " + uncommitted changes" if said(*git, "status", "--porcelain", "--", ":!benchmarks/results") else ""
    )


def gpu() -> list[str]:
    """Name, driver and memory of the first GPU."""
    lines = said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()
    cells = [cell.strip() for cell in lines[0].split(",")] if lines else []
    return cells if len(cells) == 3 else ["unknown", "unknown", "unknown"]


def page_path() -> Path:
    name = "-".join(re.findall(r"[a-z0-9]+", gpu()[0].lower()))
    default = ROOT / "benchmarks" / "results" / f"{date.today():%F}-{name}-gpu-check.md"
    return Path(os.environ.get("REPORT") or default).resolve()


def text_of(logs: Path, part: str) -> str:
    with contextlib.suppress(OSError):
        return (logs / f"{part}.log").read_text(errors="replace")
    return ""


def record_of(logs: Path, part: str) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((logs / f"{part}.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def outcome(record: dict[str, object]) -> str:
    if not record:
        return "not run"
    status = record.get("status")
    how = {0: "passed", 124: "ended at its limit"}.get(status, f"failed: ended with {status}")
    return f"{how}, {record.get('seconds')} s"


def figures(text: str) -> dict[str, float]:
    """The lines "name<TAB>figure<TAB>unit" of a log."""
    found = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            name, figure, _ = line.split("\t")
            found[name] = float(figure)
    return found


def right_if(enough: bool, everything: bool) -> bool | None:
    """A figure that is not enough decides; one that is does so if it stands for everything."""
    return False if not enough else True if everything else None


def said_ok(logs: Path, part: str) -> tuple[str, bool | None]:
    """The part's own last line: "gpu_check: ok" or "gpu_check: FAILED"."""
    text, status = text_of(logs, part), record_of(logs, part).get("status")
    cases = sum(count for name, count in figures(text).items() if name.endswith(": cases"))
    if "gpu_check: FAILED" in text or status not in (0, 2, 124, None):
        return f"{cases:g} cases", False
    return (f"{cases:g} cases", True) if status == 0 and "gpu_check: ok" in text else ("", None)


def least_ratio(
    logs: Path, part: str, algorithm: str, sizes: Iterable[int], at_least: float, ways: Iterable[str] = ("",)
) -> tuple[str, bool | None]:
    """ncclAllReduce's time in times of ringlet's, by each of NCCL's ways: the least, which decides."""
    form = re.compile(rf"{algorithm}, (\d+) virtual ranks, (\d+) B: ncclAllReduce's time(.*)")
    found = [(figure, int(match[1]), int(match[2]), match[3])
             for name, figure in figures(text_of(logs, part)).items() if (match := form.fullmatch(name))]  # fmt: skip
    found = [one for one in found if one[2] in set(sizes)]
    if not found:
        return "", None
    ratio, world, size, way = min(found)
    wanted = {(size, way) for size in sizes for way in ways}
    everything = record_of(logs, part).get("status") == 0 and {one[2:] for one in found} == wanted
    return f"{ratio:.3f} ({world} ranks, {size} B{way})", right_if(ratio >= at_least, everything)


def tests_passed(logs: Path, part: str, names: list[str]) -> tuple[str, bool | None]:
    """From the lines of pytest -v; of several the last, that of the test's end."""
    line = r"^tests/gpu/test_cuda\.py::test_(\S+) .*?\b(PASSED|FAILED|ERROR|SKIPPED)\b"
    outcomes = dict(re.findall(line, text_of(logs, part), re.MULTILINE))
    states = [outcomes.get(name, "") for name in names]
    if not any(states):
        return "", None
    wrong = states.count("FAILED") + states.count("ERROR")
    return f"{states.count('PASSED')} of {len(names)} tests", right_if(wrong == 0, set(states) == {"PASSED"})


def goals(logs: Path) -> list[Goal]:
    small, large = [4**k for k in range(4, 10)], [64 * MIB, 256 * MIB]
    found = [Goal("kernels: every result right", *said_ok(logs, "kernels"))]
    for dtype in ("float32", "bfloat16"):
        share = figures(text_of(logs, "bandwidth")).get(f"sum of two of {dtype}, 256 MiB")
        what = f"sum of two of {dtype}, 256 MiB: {COPY_SHARE} of the copy's bandwidth"
        everything = record_of(logs, "bandwidth").get("status") in (0, 124)
        found.append(Goal(what, "" if share is None else f"{share:.3f}",
                          None if share is None else right_if(share >= COPY_SHARE, everything)))  # fmt: skip
    found.append(Goal("peers' memory: contract, worlds 2 3 4 8, one process", *said_ok(logs, "pull")))
    found.append(Goal("NCCL's messages: contract, worlds 2 3 4, one process", *said_ok(logs, "nccl")))
    found.append(Goal("one_shot faster than ncclAllReduce up to 256 KiB (its time / ringlet's, the least)",
                      *least_ratio(logs, "pull-speed", "one_shot", small, 1.0, WAYS)))  # fmt: skip
    for name in ("ring", "two_shot"):
        what = f"{name} over NCCL: {NCCL_SHARE} of ncclAllReduce's speed at 64 and 256 MiB (the least)"
        found.append(Goal(what, *least_ratio(logs, "nccl-speed", name, large, NCCL_SHARE)))
    found += [Goal(what, *tests_passed(logs, *wanted)) for what, wanted in TESTED.items()]
    status = record_of(logs, "sanitizer").get("status")
    unfit = "Device not supported" in text_of(logs, "sanitizer")  # within some sandboxes
    known = {0: True, None: None, 124: None, 127: None}.get(status, False)
    found.append(Goal("compute-sanitizer finds nothing in the kernels and in all ranks' pull kernels",
                      "it does not support this device" if unfit else "", None if unfit else known))  # fmt: skip
    return found


def versions(logs: Path, names: list[str]) -> list[tuple[str, str]]:
    """What the parts' logs say about CUDA and NCCL."""
    everything = "\n".join(text_of(logs, name) for name in names)
    runtime = re.search(r"^cuda\t(.*)", everything, re.MULTILINE)
    nccl = re.search(r"NCCL version (\S+)", everything)
    channels = sorted(set(re.findall(r"NCCL INFO (\d+ coll channels.*)", everything)))
    return [("CUDA", runtime[1] if runtime else "unknown"), ("NCCL", nccl[1] if nccl else "unknown"),
            ("NCCL's channels", "; ".join(channels) or "unknown")]  # fmt: skip


def table(heads: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(heads), "|" + "---|" * len(heads), *map(line, rows), ""]


def page(logs: Path, names: list[str]) -> str:
    name, driver, memory = gpu()
    facts = [("GPU", name), ("driver", driver), ("memory", memory), *versions(logs, names), ("commit", commit())]
    lines = [f"# GPU check on {name}, {date.today():%F}", "", NOTE, "", *table(["", ""], facts)]
    lines += ["## What must be shown", ""]
    lines += table(["what", "figure", "met"], [(g.what, g.figure, g.verdict()) for g in goals(logs)])
    records = {part: record_of(logs, part) for part in names}
    rows = [(part, outcome(record), record.get("commit", "")) for part, record in records.items()]
    lines += ["## Parts", "", *table(["part", "outcome", "commit"], rows)]
    for part in names:
        text = text_of(logs, part).strip("\n").splitlines()[-TAIL:]
        # In a fence of a page whose links are checked.
        shown = [line[:400].rstrip().replace("```", "'''").replace("](", "] (") for line in text] or ["no log"]
        lines += [f"## {part}", "", "```", *shown, "```", ""]
    # Where the repository and homes lie is nobody's matter.
    told = "\n".join(lines).replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    return re.sub(r"(?<![\w.}/])/(?:root|home)/(?:[^\s/:,;'\"]+/)*", ".../", told)


def write(path: Path, logs: Path, names: list[str]) -> None:
    """Whole or not at all: a reader sees the page of before meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(page(logs, names), encoding="utf-8", errors="replace")
    os.replace(fresh, path)
