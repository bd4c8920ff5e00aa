"""What `make gpu-check` runs, on a machine with one NVIDIA GPU: it builds with what is there, tests, measures, and
writes the page of tests/gpu/summary.py anew after every part. It downloads nothing.

    python tests/gpu/check.py virtual             all ranks in one process, as streams: the kernels and both engines
    python tests/gpu/check.py ranks               ranks as threads and as processes: what programs see
    python tests/gpu/check.py sanitizer messages  some parts again; the others keep their logs

Each half takes 570 seconds at most, or LIMIT. The Python that runs it has torch (a CUDA build), numpy, pytest,
cmake and ninja. RINGLET_NCCL_LIBRARY names an NCCL of 2.30.3 or later, so that ranks may share the GPU: a .so, or a
.so...xz, which is unpacked. REPORT names the page.

Exit status: 0; 1 if a part failed or was not run; 2 if there is no GPU; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import summary

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "out" / "gpu-check"
BUILD = ROOT / "build" / str(sys.implementation.cache_tag)
SECONDS = 570.0  # of a half, unless LIMIT says how many
LEAST = 5.0  # seconds; with less left a part is not begun
GRACE = 8.0  # seconds from SIGTERM to SIGKILL: pytest prints its failures meanwhile
ENDED = 124  # the status of a part that was ended at its limit, as timeout(1) has it
PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-ra", "--tb=short", "--durations=15",
          "-p", "no:cacheprovider", "-o", "pythonpath=. python tests/support", "tests/gpu", "-m")  # fmt: skip
GPU_CHECK = str(BUILD / "gpu_check")
Command = tuple[str, ...]

# Ranks share one GPU: nothing that only several GPUs or hosts have, and hardware queues for all streams.
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "INFO",  # INIT tells the channels
    "NCCL_DEBUG_SUBSYS": "INIT",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
IN_PYTHON = {
    "RINGLET_TEST_HANG_SECONDS": "45",
    "RINGLET_TEST_TIMEOUT": "15",
    "PYTHONUNBUFFERED": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


@dataclass(frozen=True)
class Part:
    """seconds: at most. ctas: how many of the GPU's processors NCCL may take for a rank. nccl: whether it needs one."""

    name: str
    half: str
    seconds: float
    commands: tuple[Command, ...]
    nccl: bool = False
    ctas: str = ""
    more: dict[str, str] = field(default_factory=dict)


def parts() -> list[Part]:
    """In their order. Both halves build: a second call may find another machine."""
    make = ("cmake", "--build", str(BUILD), "--parallel", str(len(os.sched_getaffinity(0))), "--target", "gpu_check")
    build = ((sys.executable, "setup.py", "-q", "build_ext", "--inplace"), make)
    # A kernel that is loaded while another spins for it would wait for ever. NCCL's nodes for mixing graphs with other
    # calls can hang where one thread launches the graphs of several ranks (env.html#nccl-graph-mixing-support), and
    # would stand in each call that is measured.
    one_thread = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_GRAPH_MIXING_SUPPORT": "0"}
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", GPU_CHECK)

    def virtual(name: str, seconds: float, nccl: bool = False, ctas: str = "") -> Part:
        return Part(name, "virtual", seconds, ((GPU_CHECK, name),), nccl, ctas, one_thread)

    def ranks(name: str, seconds: float, marker: str, nccl: bool = False, **more: str) -> Part:
        return Part(name, "ranks", seconds, ((*PYTEST, marker),), nccl, "2", IN_PYTHON | more)

    return [
        Part("build", "both", 170, build),
        virtual("smoke", 40),  # with all kernels to load and NCCL's first communicators to make
        virtual("kernels", 40),
        virtual("bandwidth", 30),
        virtual("pull", 60),
        virtual("nccl", 60, True, "8"),
        virtual("nccl-speed", 80, True, "2"),  # as many channels as peers on one GPU get
        virtual("pull-speed", 90, ctas="16"),
        ranks("ipc-smoke", 45, "smoke"),  # imports torch, perhaps from a cold disk
        ranks("threads", 50, "threads"),
        ranks("processes", 70, "processes"),
        # NCCL's first communicator takes long, and may take half the timeout.
        ranks("messages", 160, "nccl", True, RINGLET_TEST_TIMEOUT="30"),
        Part("sanitizer", "ranks", 60, ((*sanitizer, "kernels", "--few"), (*sanitizer, "pull", "--few", "--together"))),
    ]


def environment(part: Part, nccl: Path | None) -> dict[str, str]:
    """What a user has set stays as it is."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    made = SHARED_GPU | part.more | ({"NCCL_MAX_CTAS": part.ctas} if part.ctas else {}) | os.environ | {"PATH": path}
    if part.half == "ranks":
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]))
        if part.nccl and nccl:  # or torch finds its own first
            made["LD_PRELOAD"] = os.pathsep.join(filter(None, [str(nccl), os.environ.get("LD_PRELOAD", "")]))
    served = nccl if part.nccl or part.half != "ranks" else None  # NCCL does not serve threads that share a GPU
    return made | {"RINGLET_NCCL_LIBRARY": str(served) if served else "/nonexistent",
                   "RINGLET_CUDA_LIBRARY": str(BUILD / "libringlet_cuda.so")}  # fmt: skip


def below(pid: int) -> Iterator[int]:
    """The processes that stand below this one; ranks of `ringlet bench` are leaders of groups of their own."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from below(child)


def execute(command: Command, log: Path, limit: float, variables: dict[str, str]) -> int:
    """The exit status; ENDED, and everything that the command started with it, if it took longer."""
    with open(log, "ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(command, env=variables, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return ENDED
    finally:
        started = list(below(process.pid))
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in (process.pid, *started):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, sign) if pid == process.pid else os.kill(pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):  # what waits in the driver does not die
                process.wait(GRACE)


def run(part: Part, limit: float, nccl: Path | None) -> dict[str, object]:
    """Its log and its record replace an earlier run's."""
    log, started, status = LOGS / f"{part.name}.log", time.monotonic(), 0
    log.write_bytes(b"")
    for command in part.commands:
        left = limit - (time.monotonic() - started)
        try:
            status = execute(command, log, left, environment(part, nccl)) if left > 0 else ENDED
        except OSError as error:
            log.write_text(f"could not be started: {error}\n")
            status = 127
        if status != 0:
            break
    record = {"status": status, "seconds": round(time.monotonic() - started, 1), "commit": summary.commit()}
    (LOGS / f"{part.name}.json").write_text(json.dumps(record) + "\n")
    return record


def nccl_library() -> Path | None:
    """The file that RINGLET_NCCL_LIBRARY names; one that ends with .xz is unpacked."""
    named = os.environ.get("RINGLET_NCCL_LIBRARY")
    if not named:
        return None
    if not Path(named).exists():
        raise SystemExit(f"RINGLET_NCCL_LIBRARY names {named}, and there is no such file")
    if not named.endswith(".xz"):
        return Path(named).resolve()
    unpacked = LOGS / "libnccl.so.2"
    if not unpacked.exists() or unpacked.stat().st_mtime < Path(named).stat().st_mtime:
        with lzma.open(named) as packed, open(unpacked, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    return unpacked


def chosen(words: list[str]) -> list[Part]:
    every = parts()
    names, halves = {part.name for part in every}, ("virtual", "ranks")
    unknown = set(words) - names - set(halves)
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such part; there are {', '.join((*halves, *names))}")
    wanted = set(words or ["virtual"])
    return [part for part in every if part.name in wanted or part.half in wanted
            or (part.half == "both" and wanted & set(halves))]  # fmt: skip


def main(words: list[str]) -> int:
    until = time.monotonic() + float(os.environ.get("LIMIT", SECONDS))
    some = chosen(words)
    if not summary.said("nvidia-smi", "-L"):
        print("make gpu-check needs an NVIDIA GPU, and there is no nvidia-smi here that sees one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part under way is ended with the check
    LOGS.mkdir(parents=True, exist_ok=True)
    nccl, wrong = nccl_library(), False
    page = summary.page_path()
    for part in some:
        left = min(part.seconds, until - time.monotonic())
        why = "no NCCL (RINGLET_NCCL_LIBRARY)" if part.nccl and nccl is None else "no time left" if left < LEAST else ""
        try:
            record = {} if why else run(part, left, nccl)
        except KeyboardInterrupt:
            summary.write(page, LOGS, [one.name for one in parts()])
            return 130
        wrong = wrong or bool(why) or record["status"] != 0
        print(f"{part.name}: {why or summary.outcome(record)}", flush=True)
        summary.write(page, LOGS, [one.name for one in parts()])
    for goal in summary.goals(LOGS):
        print(goal.line())
    print(page)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
