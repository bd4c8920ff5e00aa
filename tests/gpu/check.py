"""What `make gpu-check` does, on a machine with one NVIDIA GPU: builds with what is there, tests, measures, and writes
a page anew after every part. It downloads nothing, needs nobody, and keeps to its time.

    python tests/gpu/check.py                               all parts, in 530 seconds at most
    python tests/gpu/check.py --parts sanitizer,bench-large  a second call adds what the first did not get to

PYTHON that runs it has torch (a CUDA build), numpy, pytest, cmake and ninja. RINGLET_NCCL_LIBRARY names an NCCL of
2.30.3 or later, so that ranks may share the GPU: a .so, or a .so...xz, which is unpacked. REPORT names the page.

Exit status: 0; 1 where a part failed or, though asked for, was not run; 2 where there is no GPU; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import machine
import page
from goals import goals, met
from parts import GRACE, ROOT, Logs, Part, Record, Running, carry_out, say

CUDA_TOOLS = "/usr/local/cuda/bin"
FOR_GPU_CHECK = 40.0  # seconds that the extension leaves, should it not build in time
SHOWN_LINES = 15  # of a failed part's log, on the terminal
PYTEST = ("-o", "addopts=", "-v", "-ra", "--tb=short", "--durations=15", "-p", "no:cacheprovider",
          "-o", "pythonpath=. python tests/support", "tests/gpu")  # fmt: skip

# Ranks share one GPU: nothing that only several GPUs or hosts have, and hardware queues for all streams.
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
Environment = dict[str, str]


@dataclass(frozen=True)
class Setup:
    """What the parts are made from. base: this process's environment. nccl: a library, or None."""

    base: Environment
    folder: Path
    logs: Logs
    nccl: Path | None

    @property
    def gpu_check(self) -> Path:
        return self.folder / "gpu_check"

    def environment(self, ctas: str = "", **more: str) -> Environment:
        """What a user has set stays as it is. ctas: how many of the GPU's processors NCCL may take for a rank."""
        made = SHARED_GPU | more | ({"NCCL_MAX_CTAS": ctas} if ctas else {}) | self.base
        made.pop("RINGLET_NCCL_LIBRARY", None)
        return made | ({"RINGLET_NCCL_LIBRARY": str(self.nccl)} if self.nccl else {})

    def of_gpu_check(self, ctas: str = "") -> Environment:
        # A kernel that is loaded while another spins for it would wait for ever.
        library = str(self.folder / "libringlet_cuda.so")
        return self.environment(ctas, CUDA_MODULE_LOADING="EAGER", RINGLET_CUDA_LIBRARY=library)

    def of_python(self, nccl: bool = True) -> Environment:
        """Without `nccl` nothing of it is touched."""
        made = self.environment("2", RINGLET_TEST_HANG_SECONDS="45", RINGLET_TEST_TIMEOUT="15")
        made["PYTHONPATH"] = joined(str(ROOT / "python"), self.base.get("PYTHONPATH", ""))
        made |= {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        if not nccl:
            return made | {"RINGLET_NCCL_LIBRARY": "/nonexistent"}
        # Otherwise torch finds its own: its path to that goes before LD_LIBRARY_PATH.
        return made | {"LD_PRELOAD": joined(str(self.nccl or ""), self.base.get("LD_PRELOAD", ""))}

    def of_sanitizer(self) -> Environment:
        made = self.of_gpu_check() | {"CUDA_MODULE_LOADING": "LAZY"}
        made.pop("LD_PRELOAD", None)
        return made


def joined(*paths: str) -> str:
    return os.pathsep.join(filter(None, paths))


def all_parts(setup: Setup) -> list[Part]:
    def no_gpu_check() -> str:
        return "" if setup.gpu_check.exists() else "no gpu_check"

    def no_nccl() -> str:
        return "" if setup.nccl else "no NCCL (RINGLET_NCCL_LIBRARY)"

    def mode(name: str, seconds: float, ctas: str = "", lacks: Callable[[], str] = no_gpu_check) -> Part:
        return Part(name, seconds, lambda part: gpu_check(setup, name, part), setup.of_gpu_check(ctas), lacks)

    def suite(name: str, marker: str, environment: Environment, lacks: Callable[[], str] = str) -> Part:
        command = (sys.executable, "-m", "pytest", *PYTEST, "-m", marker)
        return Part(name, 110, lambda part: part.run(*command), environment, lacks)

    def sweep(name: str, seconds: float) -> Part:
        return Part(name, seconds, lambda part: bench(setup, name, part), setup.of_python(), no_nccl)

    sanitizer = shutil.which("compute-sanitizer", path=joined(setup.base["PATH"], CUDA_TOOLS)) or ""
    return [
        Part("build", 200, lambda part: build(setup, part), setup.base),
        mode("kernels", 40),
        mode("bandwidth", 30),
        mode("pull", 60),
        mode("pull-speed", 40, "16"),
        mode("nccl", 60, "8", lambda: no_gpu_check() or no_nccl()),
        mode("nccl-speed", 60, "8", lambda: no_gpu_check() or no_nccl()),
        suite("peers", "peers", setup.of_python(nccl=False)),
        suite("messages", "nccl", setup.of_python(), no_nccl),
        sweep("bench-small", 40),
        sweep("bench-large", 50),
        Part("sanitizer", 90, lambda part: sanitize(setup, sanitizer, part), setup.of_sanitizer(),
             lambda: no_gpu_check() or ("" if sanitizer else "no compute-sanitizer")),
    ]  # fmt: skip


def build(setup: Setup, part: Running) -> None:
    """The extension, then gpu_check, which needs nothing of it and is built in any case; not an earlier source's."""
    make = ("cmake", "--build", str(setup.folder), "--parallel", str(len(os.sched_getaffinity(0))), "--target")
    if part.run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", leave=FOR_GPU_CHECK) == 0:
        status = part.run(*make, "gpu_check")
    else:
        if not any((setup.folder / name).exists() for name in ("build.ninja", "Makefile")):
            without = ("-DRINGLET_BINDINGS=OFF", "-DCMAKE_BUILD_TYPE=Release")
            part.run("cmake", "-S", str(ROOT), "-B", str(setup.folder), *without)
        keep_going = ("-k", "0") if (setup.folder / "build.ninja").exists() else ("-k",)
        status = part.run(*make, "ringlet_cuda", "gpu_check", "--", *keep_going)
    if status != 0:
        setup.gpu_check.unlink(missing_ok=True)


def gpu_check(setup: Setup, mode: str, part: Running) -> None:
    part.run(str(setup.gpu_check), mode)


def bench(setup: Setup, name: str, part: Running) -> None:
    """Whatever becomes of the sweep, its table of what it measured."""
    rows = setup.logs.rows_file(name)
    for old in (rows, rows.with_suffix(".meta.json")):
        old.unlink(missing_ok=True)
    command = (sys.executable, "-m", "ringlet", "bench")
    status = part.run(*command, "--sweep", name.replace("bench", "gpu"), "--json", str(rows), "--timeout", "25")
    if status != 0 and rows.exists() and rows.stat().st_size > 0:
        part.run(*command, "--from", str(rows), beyond=20)


def sanitize(setup: Setup, sanitizer: str, part: Running) -> None:
    for mode in ("kernels", "pull"):
        part.run(sanitizer, "--error-exitcode", "9", str(setup.gpu_check), mode, "--few")


def base_environment() -> Environment:
    """This process's, with the tools of its Python and of CUDA on PATH."""
    path = joined(sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))
    if shutil.which("nvcc", path=path) is None and Path(CUDA_TOOLS, "nvcc").exists():
        path = joined(path, CUDA_TOOLS)
    return {**os.environ, "PATH": path}


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=530, metavar="S", help="for all of it (default 530)")
    parser.add_argument("--parts", metavar="A,B", help="only these; the others keep their logs of before")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "gpu-check", metavar="DIR",
                        help="where logs go and stay (default out/gpu-check)")  # fmt: skip
    parser.add_argument("--report", type=Path, default=os.environ.get("REPORT") or None, metavar="FILE",
                        help="the page (default benchmarks/results/DATE-GPU-gpu-check.md)")  # fmt: skip
    return parser.parse_args(words)


def selected(parts: list[Part], chosen: str | None) -> list[Part]:
    """Those named, in their own order; all where none is."""
    names = set(filter(None, chosen.split(","))) if chosen else {part.name for part in parts}
    unknown = names - {part.name for part in parts}
    if unknown:
        known = ", ".join(part.name for part in parts)
        raise SystemExit(f"--parts: {', '.join(sorted(unknown))} is not one of {known}")
    return [part for part in parts if part.name in names]


def shower(shown: page.Page, path: Path) -> Callable[[dict[str, str]], None]:
    """Writes the page. What is wrong with it, or with the disk, does not end the check."""

    def show(not_run: dict[str, str]) -> None:
        shown.not_run = dict(not_run)
        try:
            page.write(path, shown.text())
        except Exception:
            say(traceback.format_exc())

    return show


def conclude(logs: Logs, parts: list[Part], not_run: dict[str, str]) -> int:
    """Tells the goals, and the ends of the logs of what went wrong; the exit status."""
    wrong = [part for part in parts if part.name in not_run or not (logs.record(part.name) or Record()).passed]
    for part in wrong:
        if part.name not in not_run:
            say(f"\n--- {part.name}, the end of its log", *logs.text(part.name).splitlines()[-SHOWN_LINES:])
    say("")
    for goal in goals():
        told, right = goal.verdict(logs)
        say(f"{met(right)}: {goal.what}{f': {told}' if told else ''}")
    return 1 if wrong else 0


def main(words: list[str] | None = None) -> int:
    until = time.monotonic()
    chosen = arguments(words)
    until += chosen.seconds
    gpu = machine.gpu()
    if gpu is None:
        print("make gpu-check needs an NVIDIA GPU, and here is no nvidia-smi that sees one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part under way is ended with the check
    logs = Logs(chosen.logs.resolve(), gpu["name"])
    logs.folder.mkdir(parents=True, exist_ok=True)
    try:
        nccl = machine.nccl_library(os.environ.get("RINGLET_NCCL_LIBRARY"), logs.folder)
        told = machine.nccl_version(nccl)
    except machine.NoNccl as error:
        nccl, told = None, f"none: {error}"
    base = base_environment()
    setup = Setup(base, ROOT / "build" / str(sys.implementation.cache_tag), logs, nccl)
    parts = all_parts(setup)
    asked = selected(parts, chosen.parts)
    now, revision = datetime.now().astimezone(), machine.commit()
    name = "-".join("".join(c if c.isalnum() else " " for c in gpu["name"].lower()).split())
    path = (chosen.report or ROOT / "benchmarks" / "results" / f"{now:%F}-{name}-gpu-check.md").resolve()
    known = machine.facts(gpu, told, revision, base["PATH"])
    when = f"{now:%F %T %Z}"
    show = shower(page.Page(gpu["name"], f"{now:%F}", known, parts, logs, when), path)
    of_run = Record(when=when, commit=revision, device=gpu["name"])
    try:
        not_run = carry_out(asked, logs, of_run, until, show=show, grace=GRACE)
    except KeyboardInterrupt:
        print(f"interrupted; {path}", file=sys.stderr)
        return 130
    status = conclude(logs, asked, not_run)
    say(str(path))
    return status


if __name__ == "__main__":
    sys.exit(main())
