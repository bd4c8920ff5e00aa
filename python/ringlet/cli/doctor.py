"""`ringlet doctor`: shows what was built, checks what works on this machine, and says how to fix the rest.

It tries each part: for example, the transports run a real all-reduce on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ringlet
from ringlet import _C, extension
from ringlet.cli import options, outputs
from ringlet.cli.terminal import progress
from ringlet.cli.topology import topology_command
from ringlet.cli.variables import VARIABLES, problems
from ringlet.joining import congestion_controls

WORLD = 2
TIMEOUT_S = 30.0
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Finding(NamedTuple):
    """state: "ok", "absent" (nothing needs it), "poor" (it works, but slowly) or "fails". advice: what to do."""

    part: str
    name: str
    state: str
    told: str
    advice: str = ""


def add_to(commands: Any) -> None:
    parser = options.add_command(
        commands, "doctor", doctor_command,
        help="check what works on this machine, and how to fix the rest",
        description="Try transports, CPU kernels and GPU parts on this machine, and check ringlet's environment "
        "variables. The exit code is 1 if a part that ringlet needs does not work.",
        examples="ringlet doctor\ntorchrun --nproc-per-node 4 -m ringlet doctor --topology",
    )  # fmt: skip
    options.add(parser, "json", help="also write the findings to FILE")
    parser.add_argument("--topology", action="store_true",
        help="under torchrun, mpirun or srun: show the hosts of the ranks and the transports between them")  # fmt: skip


def doctor_command(args: argparse.Namespace) -> int:
    outputs.check({"--json": args.json})
    if args.topology:
        return topology_command()
    findings, advice = [], dict[str, list[str]]()
    for found in examine():
        findings.append(found)
        print(f"{found.part:<10} {found.name:<14} {found.state:<7} {found.told}", flush=True)
        if found.advice:
            advice.setdefault(found.advice, []).append(found.name)
    if advice:
        print("\nwhat to do:")
    for what, names in advice.items():
        print(f"  {', '.join(names)}: {what}")
    fails = any(found.state == "fails" for found in findings)
    if args.json:
        report = {"ok": not fails, "findings": [found._asdict() for found in findings]}
        outputs.write(args.json, json.dumps(report, indent=1) + "\n")
    return 1 if fails else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they depend on each other. If a part raises, that is a finding too."""
    wrong: list[str] = []
    for part, section in (
        ("build", _build),
        ("host", _host),
        ("variables", lambda: _variables(wrong)),
        ("kernels", _kernels),
        ("transport", lambda: _transports(wrong)),
        ("gpu", _gpu),
    ):
        try:
            yield from section()
        except Exception as error:  # of whatever library: an environment that doctor has not met before
            yield Finding(part, "(rest)", "fails", f"the check raised: {_reason(error)}", "see the message")


def _build() -> Iterator[Finding]:
    info = _C.build_info()
    told = f"{ringlet.__version__}, {info['compiler']}, for Python {info['python']} and torch {info['torch']}"
    yield Finding("build", "ringlet", "ok", told)
    versions = extension.served()
    told = torch.__version__ + (f"; ringlet is installed for {', '.join(versions)}" if versions else "")
    yield Finding("build", "torch", "ok", told)


def _host() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("host", "cores", "ok", f"{cores} of {os.cpu_count()} usable, {platform.machine()}")
    advice = "memory that peers map needs memfd_create: Linux 3.17, or a sandbox that lets it through"
    yield _host_call("memfd", "fails", lambda: os.memfd_create("ringlet-doctor"), advice)
    advice = "without pidfd_open (Linux 5.3) a dead rank is not seen while a child that it forked lives"
    yield _host_call("pidfd", "poor", lambda: os.pidfd_open(os.getpid()), advice)
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        yield Finding("host", "huge pages", "absent", f"no {HUGE_PAGES}")
    else:
        right = chosen in ("advise", "always", "within_size", "force")
        advice = "" if right else f"for fewer TLB misses in large buffers, as root: echo advise > {HUGE_PAGES}"
        yield Finding("host", "huge pages", "ok" if right else "poor", f"shmem_enabled = {chosen}", advice)


def _host_call(name: str, otherwise: str, attempt: Callable[[], int], advice: str) -> Finding:
    """Whether a system call that makes a descriptor works; `otherwise` is the state if not."""
    try:
        os.close(attempt())
    except OSError as error:
        return Finding("host", name, otherwise, str(error), advice)
    return Finding("host", name, "ok", "works")


def _variables(wrong: list[str]) -> Iterator[Finding]:
    """Findings on wrong environment variables, whose names go into `wrong`, and on the table of `auto`."""
    for name, told, advice in problems():
        known = name in VARIABLES
        wrong += [name] if known else []
        yield Finding("variables", name, "fails" if known else "poor", told, advice)
    if "RINGLET_TABLE" in wrong:
        return
    try:
        file, text = _C.given_table()
        _C.chosen("all_reduce", 1, 2, "staged", text)
    except ringlet.Error as error:
        advice = "make the table readable, correct it, or set RINGLET_TABLE to an empty value"
        yield Finding("variables", "table", "fails", str(error), advice)
    else:
        told = f"rules of {file}" if text else "no table: ringlet uses the built-in rules"
        yield Finding("variables", "table", "ok", told)


def _kernels() -> Iterator[Finding]:
    found = _C.kernels()
    told = f"{found['chosen']} of {', '.join(found['available'])}"
    if found["chosen"] == "portable" and platform.machine() == "x86_64" and len(found["available"]) == 1:
        advice = "this processor (or virtual machine) lacks AVX2, F16C or FMA; 16-bit sums are much slower without"
        yield Finding("kernels", "CPU", "poor", told, advice)
    else:
        yield Finding("kernels", "CPU", "ok", told)


def _transports(wrong: list[str]) -> Iterator[Finding]:
    """wrong: the variables with wrong values; the user must correct these first."""
    for name, told, advice in (
        ("threads", "threads is right", "see the message; if it names an undefined symbol, build ringlet again"),
        ("shared_memory", f'processes is right, also through torch.distributed ("{ringlet.backend.NAME}")',
         "see the host findings above"),
        ("tcp", "processes over loopback is right",
         "a sandbox or firewall may forbid listening and connecting on loopback"),
    ):  # fmt: skip
        with progress(f"trying {name} on {WORLD} ranks"):
            try:
                _try(name)
            except Exception as error:  # whatever a rank raised, of any library, is the finding
                first = f"first correct the variables that fail above: {', '.join(wrong)}"
                yield Finding("transport", name, "fails", _reason(error), first if wrong else advice)
            else:
                yield Finding("transport", name, "ok", f"all_reduce on {WORLD} {told}")
    try:
        machines, used = congestion_controls()
    except ringlet.Error as error:
        yield Finding("transport", "tcp congestion", "fails", str(error), "set another name, or unset it")
    else:
        slower = "" if machines == used else f"; this machine's {machines} would be slower for collectives"
        yield Finding("transport", "tcp congestion", "ok", used + slower)


def _reason(error: Exception) -> str:
    """The last line of the error: in a rank's traceback, the exception."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _try(name: str) -> None:
    """An all-reduce on ranks of that transport; on processes that share memory through torch.distributed, too."""
    with tempfile.TemporaryDirectory(prefix="ringlet-doctor-") as folder:
        by_default = name == "shared_memory"
        chosen = {} if by_default else {"transport": name}
        ringlet.spawn(_add_up, WORLD, (folder if by_default else "",), timeout=TIMEOUT_S, **chosen)


def _add_up(rank: int, folder: str) -> None:
    """Sums 1, 2, ... over the ranks, in registered and in ordinary memory. folder: of a store; empty: not through
    torch."""
    for values in (ringlet.empty(1 << 16), torch.empty(1 << 16)):
        _check(ringlet.all_reduce(values.fill_(rank + 1)))
    if folder:
        store = dist.FileStore(f"{folder}/store", WORLD)
        dist.init_process_group(ringlet.backend.NAME, store=store, rank=rank, world_size=WORLD)
        values = torch.full((1 << 16,), rank + 1.0)
        dist.all_reduce(values)
        dist.destroy_process_group()
        _check(values)


def _check(values: torch.Tensor) -> None:
    wanted = WORLD * (WORLD + 1) / 2
    if not bool((values == wanted).all()):
        raise ringlet.Error(f"all_reduce gave {values.unique().tolist()[:4]}, but every element must be {wanted}")


def _gpu() -> Iterator[Finding]:
    with progress("asking the GPU"):
        gpu = _C.gpu_status()
    state = {"ready": "ok", "error": "fails", "not loaded": "fails"}.get(gpu["state"], "absent")
    versions = [
        f"{what} {version // 1000}.{version % 1000 // 10}"
        for what, version in (("CUDA runtime", gpu["runtime_version"]), ("driver for CUDA", gpu["driver_version"]))
        if version
    ]
    told = ", ".join(filter(None, [gpu["state"], gpu["detail"], *versions]))
    yield Finding("gpu", "CUDA", state, told, gpu["advice"])
    nccl = _C.nccl_status()
    state = {"ready": "ok"}.get(nccl["state"], "poor" if gpu["state"] == "ready" else "absent")
    told, _, why = nccl["detail"].partition(": ")
    yield Finding("gpu", "NCCL", state, told, why)
