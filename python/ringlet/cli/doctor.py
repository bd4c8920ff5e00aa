"""`ringlet doctor`: shows what was built, checks what works on this machine, and says how to fix the rest.

It tries each part: for example, the transports run a real all-reduce on two ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ringlet
from ringlet import _C, extension
from ringlet.bench import repository
from ringlet.bench.cases import MPI_PEERS
from ringlet.cli import options, outputs
from ringlet.cli.terminal import progress
from ringlet.cli.topology import topology_command
from ringlet.cli.tune import calibrates
from ringlet.cli.variables import VARIABLES, problems
from ringlet.group import congestion_controls

WORLD = 2
TIMEOUT_S = 30.0
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
# x86-64 has numbers of its own; aarch64 and later architectures share theirs.
MEMBARRIER_CALL = 324 if platform.machine() == "x86_64" else 283


@dataclass(frozen=True)
class Finding:
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
    findings = []
    for finding in examine():
        findings.append(finding)
        print(_line(finding), flush=True)
    fails = [finding for finding in findings if finding.state == "fails"]
    _print_advice(findings)
    if args.json:
        report = {"ok": not fails, "findings": [dataclasses.asdict(finding) for finding in findings]}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
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
        ("peers", _peers),
    ):
        try:
            yield from section()
        except Exception as error:  # of whatever library: an environment that doctor has not met before
            yield Finding(part, "(rest)", "fails", f"the check raised: {_reason(error)}", "see the message")


def _variables(wrong: list[str]) -> Iterator[Finding]:
    """Findings on wrong environment variables, whose names go into `wrong`, and on the table of `auto`."""
    for name, told, advice in problems():
        known = name in VARIABLES
        wrong += [name] if known else []
        yield Finding("variables", name, "fails" if known else "poor", told, advice)
    if "RINGLET_TABLE" not in wrong:
        table = _table()
        yield table
        if table.state == "ok":
            yield _calibration()


def _table() -> Finding:
    try:
        file, text = _C.given_table()
        _C.chosen("all_reduce", 1, 2, "staged", text)
    except ringlet.Error as error:
        advice = "make the table readable, correct it, or set RINGLET_TABLE to an empty value"
        return Finding("variables", "table", "fails", str(error), advice)
    return Finding(
        "variables", "table", "ok", f"rules of {file}" if text else "no table: ringlet uses the built-in rules"
    )


def _calibration() -> Finding:
    """Whether the table in force was calibrated on this processor."""
    processor = _C.processor_model()
    _, text = _C.given_table()
    if any(calibrates(line, processor) for line in text.splitlines()):
        built_in = _C.tuned("", processor)
        differ = sum(value != built_in[name] for name, value in _C.tuned(text, processor).items())
        told = f"{processor}: {differ} size{' differs' if differ == 1 else 's differ'} from the built-in ones"
        return Finding("variables", "calibration", "ok", told)
    advice = "`ringlet tune --calibrate` measures for 2 s which sizes suit this processor, and writes them to the table"
    return Finding("variables", "calibration", "absent", f"not done for {processor}: built-in sizes", advice)


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
    yield _congestion()


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
    supported = ctypes.CDLL(None, use_errno=True).syscall(MEMBARRIER_CALL, 0, 0, 0)
    told = f"commands {supported:#x}" if supported >= 0 else os.strerror(ctypes.get_errno())
    yield Finding("host", "membarrier", "ok" if supported >= 0 else "absent", told)
    yield _huge_pages()


def _host_call(name: str, otherwise: str, attempt: Callable[[], int], advice: str) -> Finding:
    """Whether a system call that makes a descriptor works; `otherwise` is the state if not."""
    try:
        os.close(attempt())
    except OSError as error:
        return Finding("host", name, otherwise, str(error), advice)
    return Finding("host", name, "ok", "works")


def _huge_pages() -> Finding:
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding("host", "huge pages", "absent", f"no {HUGE_PAGES}")
    if chosen in ("advise", "always", "within_size", "force"):
        return Finding("host", "huge pages", "ok", f"shmem_enabled = {chosen}")
    advice = f"for fewer TLB misses in large buffers, as root: echo advise > {HUGE_PAGES}"
    return Finding("host", "huge pages", "poor", f"shmem_enabled = {chosen}", advice)


def _kernels() -> Iterator[Finding]:
    found = _C.kernels()
    told = f"{found['chosen']} of {', '.join(found['available'])}"
    if found["chosen"] == "portable" and platform.machine() == "x86_64" and len(found["available"]) == 1:
        advice = "this processor (or virtual machine) lacks AVX2, F16C or FMA; 16-bit sums are much slower without"
        yield Finding("kernels", "CPU", "poor", told, advice)
    else:
        yield Finding("kernels", "CPU", "ok", told)


def _reason(error: Exception) -> str:
    """The last line of the error: in a rank's traceback, the exception."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _try(name: str) -> None:
    """An all-reduce on ranks of that transport; on processes that share memory through torch.distributed, too."""
    with tempfile.TemporaryDirectory(prefix="ringlet-doctor-") as folder:
        by_default = name == "shared_memory"
        chosen = {} if by_default else {"transport": name}
        ringlet.spawn(_add_up, WORLD, (folder if by_default else "",), timeout=TIMEOUT_S, **chosen)


def _congestion() -> Finding:
    try:
        machines, used = congestion_controls()
    except ringlet.Error as error:
        return Finding("transport", "tcp congestion", "fails", str(error), "set another name, or unset it")
    slower = "" if machines == used else f"; this machine's {machines} would be slower for collectives"
    return Finding("transport", "tcp congestion", "ok", used + slower)


def _add_up(rank: int, folder: str) -> None:
    """Sums 1, 2, ... over the ranks, in registered and in ordinary memory. folder: of a store; empty: not through
    torch."""
    for values in (ringlet.empty(1 << 16), torch.empty(1 << 16)):
        values.fill_(rank + 1)
        ringlet.all_reduce(values)
        _check(values)
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


def _peers() -> Iterator[Finding]:
    gloo = dist.is_gloo_available()
    yield Finding("peers", "gloo", "ok" if gloo else "absent", "part of this torch" if gloo else "not in this torch")
    there, where = repository.installed(), repository.root() or "ringlet's repository"
    for name in MPI_PEERS:
        if name in there:
            yield Finding("peers", name, "ok", "installed, for `ringlet bench --peers`")
        else:
            yield Finding(
                "peers", name, "absent", "not installed", f"only to compare with: run `make peers` in {where}"
            )


def _line(finding: Finding) -> str:
    return f"{finding.part:<10} {finding.name:<14} {finding.state:<7} {finding.told}"


def _print_advice(findings: list[Finding]) -> None:
    """Prints the advice. If several findings share it, prints it once."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        if finding.advice:
            names.setdefault(finding.advice, []).append(finding.name)
    if names:
        print("\nwhat to do:")
    for advice, whose in names.items():
        print(f"  {', '.join(whose)}: {advice}")
