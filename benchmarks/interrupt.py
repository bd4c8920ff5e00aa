"""From Ctrl-C to the end of the last process, for ranks that wait: p50 and p99 by launcher, world and kind of wait.

    python -m benchmarks.interrupt --repeats 50 --spawn-repeats 10 --json out/interrupt.jsonl

A job is a process group of its own. When all of its ranks are about to wait, and 0.3 s later, the whole group gets
SIGINT, as from a terminal. The last rank never makes the call that the others wait in. Launchers: `spawn` is
ringlet.spawn (each repetition imports torch in every rank, so there are fewer), `ranks` are processes with RANK set, as
under torchrun, forked from one that has imported torch, `threads` is ringlet.spawn with ranks as threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import ringlet

SETTLE_S, LIMIT_S, TIMEOUT_S = 0.3, 60.0, 50.0
LAUNCHERS = ("spawn", "ranks", "threads")


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


def behind() -> None:
    ringlet.all_reduce(ones(), async_op=True)
    ringlet.all_reduce(ones())


def sleep_for_ever() -> None:
    while True:  # in short sleeps: in a long one nothing can be raised in a thread
        time.sleep(0.01)


# Each with the transport of its group; "torch": torch.distributed on ringlet; "none": the group is what is waited for;
# "idle": what the interpreter and torch themselves take to end.
WAITS: dict[str, tuple[str, Callable[[int, int], object]]] = {
    "no call, no group": ("idle", lambda rank, world: sleep_for_ever()),
    "all_reduce": ("auto", lambda rank, world: ringlet.all_reduce(ones())),
    "all_reduce, 16 MiB": ("auto", lambda rank, world: ringlet.all_reduce(ones(4 << 20))),
    "all_reduce, TCP": ("tcp", lambda rank, world: ringlet.all_reduce(ones())),
    "all_reduce, two hosts": ("mixed", lambda rank, world: ringlet.all_reduce(ones())),
    "recv": ("auto", lambda rank, world: ringlet.recv(ones(), world - 1)),
    "recv, TCP": ("tcp", lambda rank, world: ringlet.recv(ones(), world - 1)),
    "barrier": ("auto", lambda rank, world: ringlet.barrier()),
    "Work.wait": ("auto", lambda rank, world: ringlet.all_reduce(ones(), async_op=True).wait()),
    "behind an asynchronous call": ("auto", lambda rank, world: behind()),
    "making a group": ("none", lambda rank, world: None),
    "torch all_reduce": ("torch", lambda rank, world: dist.all_reduce(ones())),
    "torch Work.wait": ("torch", lambda rank, world: dist.all_reduce(ones(), async_op=True).wait()),
    "monitored_barrier": ("torch", lambda rank, world: ringlet.monitored_barrier()),
}
OF_THREADS = ("all_reduce", "all_reduce, 16 MiB", "recv", "barrier", "Work.wait", "behind an asynchronous call")


def await_interrupt(rank: int, world: int, folder: str, name: str) -> None:
    (Path(folder) / f"waits {rank}").touch()
    if rank == world - 1:
        sleep_for_ever()
    else:
        WAITS[name][1](rank, world)


def spawned(rank: int, world: int, folder: str, name: str) -> None:
    await_interrupt(rank, world, folder, name)


def member(rank: int, world: int, folder: str, name: str) -> None:
    """A rank as torchrun starts it."""
    transport = WAITS[name][0]
    store = dist.FileStore(str(Path(folder) / "store"), world)
    if transport == "none":
        (Path(folder) / f"waits {rank}").touch()
        if rank == world - 1:
            time.sleep(LIMIT_S)
        ringlet.init(rank, world, store, timeout=TIMEOUT_S)
    if transport == "idle":
        pass
    elif transport == "torch":
        dist.init_process_group("ringlet", store=store, rank=rank, world_size=world)
    else:
        if transport == "mixed":
            os.environ["RINGLET_HOST_ID"] = f"host {rank % 2}"
        kind = "auto" if transport == "mixed" else transport
        ringlet.init(rank, world, store, transport=kind, timeout=TIMEOUT_S)
    await_interrupt(rank, world, folder, name)


def child(act: Callable[[], None], group: int) -> int:
    """Forks a process that acts, and ends as Python does; its pid."""
    pid = os.fork()
    if pid:
        os.setpgid(pid, group or pid)  # before the next one joins the group
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback
    act()
    sys.exit()


def start(launcher: str, world: int, folder: str, name: str) -> list[int]:
    """The processes of a job, all in the group of the first."""
    if launcher == "ranks":
        pids: list[int] = []
        for rank in range(world):
            pids.append(child(lambda rank=rank: member(rank, world, folder, name), pids[0] if pids else 0))
        return pids
    transport = "threads" if launcher == "threads" else WAITS[name][0]
    args = (world, folder, name)
    return [child(lambda: ringlet.spawn(spawned, world, args, transport=transport, timeout=TIMEOUT_S), 0)]


def seconds_to_exit(launcher: str, world: int, name: str) -> float:
    folder, owner = tempfile.mkdtemp(prefix="interrupt-"), os.getpid()
    pids = start(launcher, world, folder, name)
    try:
        until = time.monotonic() + LIMIT_S
        while len(list(Path(folder).glob("waits *"))) < world:
            if time.monotonic() > until:
                raise TimeoutError(f"{launcher}, {world} ranks, {name}: not all ranks came to wait")
            time.sleep(0.005)
        time.sleep(SETTLE_S)
        began = time.monotonic()
        os.killpg(pids[0], signal.SIGINT)
        for pid in pids:
            os.waitpid(pid, 0)
        return time.monotonic() - began
    finally:
        if os.getpid() == owner:  # not in a child on its way out
            shutil.rmtree(folder, ignore_errors=True)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, str, int]]:
    for launcher in options.launchers:
        for world in options.worlds:
            for name, (transport, _) in WAITS.items():
                if launcher == "threads" and name not in OF_THREADS:
                    continue
                if launcher == "spawn" and transport not in ("auto", "tcp"):
                    continue
                yield launcher, world, name, options.spawn_repeats if launcher == "spawn" else options.repeats


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--worlds", nargs="+", type=int, default=(2, 4, 8))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--spawn-repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="one line a case, with every measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| launcher | ranks | wait | n | p50 | p99 |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    slowest = 0.0
    for launcher, world, name, repeats in cases(options):
        seconds = [seconds_to_exit(launcher, world, name) for _ in range(repeats)]
        p99 = percentile(seconds, 99)
        slowest = max(slowest, p99)
        row = f"| {launcher} | {world} | {name} | {repeats} | {statistics.median(seconds):.3f} s | {p99:.3f} s |"
        print(row, flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            with options.json.open("a") as file:
                print(json.dumps({"launcher": launcher, "world": world, "wait": name, "seconds": seconds}), file=file)
    print(f"\nslowest p99: {slowest:.3f} s")
    return 0 if slowest < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
