"""Makes and closes groups, over and over, and shows what stays of them: nothing may grow with their number.

    python -m benchmarks.groups [--kind init new_group ...] [--world 2] [--cycles 20000] [--json FILE]

In every cycle all ranks make a group, run an all-reduce and a message on it, and close it. Rank 0 prints, ten times in
the run: resident memory, file descriptors and threads of its process, bytes of the registered heap that are taken, keys
in the store, and Python objects that the collector knows. Exit codes: 0 flat, 1 something grew.

Kinds: init (ringlet.init and finalize), new_group; tcp and mixed (the same as init, over TCP, and on two hosts, for
which --world should be 4); threads; c10d (init_process_group and destroy_process_group), c10d_groups (dist.new_group).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import ringlet
from ringlet import _C

Cycle = Callable[[int], AbstractContextManager[Any]]

LIMIT = timedelta(seconds=120)
KINDS = ("init", "new_group", "tcp", "mixed", "threads", "c10d", "c10d_groups")
HEAD = ("groups", "seconds", "rss_kib", "descriptors", "threads", "heap_bytes", "store_keys", "objects")
# What may differ between two looks at a process in which nothing grows.
# torch's registries keep objects of each group, whatever its backend: 4 of a default group, 1 of another.
OBJECTS_OF_TORCH = {"c10d": 4, "c10d_groups": 1}
SLACK = {"rss_kib": 4096, "descriptors": 4, "threads": 2, "heap_bytes": 32 << 20, "store_keys": 16, "objects": 500}


def state(store: dist.TCPStore) -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "heap_bytes": _C.heap()["allocated_bytes"],
        "store_keys": store.num_keys(),
        "objects": len(gc.get_objects()),
    }


def use(group: ringlet.Group | None, rank: int, world: int) -> None:
    total = torch.ones(1000)
    ringlet.all_reduce(total, group=group)
    if rank < 2 <= world:
        message = torch.full((10,), float(rank))
        (ringlet.send if rank == 0 else ringlet.recv)(message, 1 - rank, group=group)


@contextlib.contextmanager
def initialised(rank: int, world: int, store: Any, transport: str) -> Iterator[None]:
    ringlet.init(rank, world, store, transport=transport, timeout=LIMIT, name="cycle")
    try:
        use(None, rank, world)
        yield
    finally:
        ringlet.finalize()


@contextlib.contextmanager
def child(rank: int, world: int) -> Iterator[None]:
    group = ringlet.new_group(range(world))
    assert group is not None
    use(group, rank, world)
    yield
    group.close()


def use_torch(group: dist.ProcessGroup | None, rank: int) -> None:
    total = torch.ones(1000)
    dist.all_reduce(total, group=group)
    if rank < 2:
        message = torch.full((10,), float(rank))
        (dist.send if rank == 0 else dist.recv)(message, 1 - rank, group=group)


@contextlib.contextmanager
def torch_group(rank: int, world: int, store: Any) -> Iterator[None]:
    dist.init_process_group("ringlet", store=store, rank=rank, world_size=world, timeout=LIMIT)
    use_torch(None, rank)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def torch_child(rank: int, world: int) -> Iterator[None]:
    group = dist.new_group(range(world))
    use_torch(group, rank)
    yield
    dist.destroy_process_group(group)


def cycle_of(kind: str, rank: int, world: int, store: Any) -> Cycle:
    if kind == "new_group":
        ringlet.init(rank, world, store, transport="shared_memory", timeout=LIMIT)
        return lambda number: child(rank, world)
    if kind == "c10d_groups":
        dist.init_process_group("ringlet", store=store, rank=rank, world_size=world, timeout=LIMIT)
        return lambda number: torch_child(rank, world)
    if kind == "c10d":
        return lambda number: torch_group(rank, world, store)
    transport = {"init": "shared_memory", "mixed": "auto"}.get(kind, kind)
    return lambda number: initialised(rank, world, None if kind == "threads" else store, transport)


def go_round(rank: int, kind: str, options: argparse.Namespace, store: Any, rows: list[dict[str, Any]]) -> None:
    cycle = cycle_of(kind, rank, options.world, store)
    looks = [options.cycles * part // 10 for part in range(1, 11)]
    begin = time.monotonic()
    for number in range(options.cycles):
        with cycle(number):
            pass
        if rank == 0 and number + 1 in looks:
            row = {"groups": number + 1, "seconds": round(time.monotonic() - begin), **state(options.store)}
            rows.append({"kind": kind, "world": options.world, **row})
            print("  ".join(f"{row[name]:>11}" for name in HEAD), flush=True)
    if kind == "new_group":
        ringlet.finalize()
    if kind == "c10d_groups":
        dist.destroy_process_group()


def rank_main(rank: int, kind: str, options: argparse.Namespace, port: int, report: Any) -> None:
    torch.set_num_threads(1)
    if kind == "mixed":
        os.environ["RINGLET_HOST_ID"] = f"host {rank % 2}"
    options.store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    rows: list[dict[str, Any]] = []
    go_round(rank, kind, options, options.store, rows)
    if rank == 0:
        report.put(rows)


def run(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    if kind == "threads":
        options.store = store
        rows: list[dict[str, Any]] = []
        ranks = [threading.Thread(target=go_round, args=(r, kind, options, store, rows)) for r in range(options.world)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        return rows
    context = torch.multiprocessing.get_context("spawn")
    report = context.SimpleQueue()
    torch.multiprocessing.spawn(rank_main, (kind, options, store.port, report), options.world)
    return report.get()


def grown(rows: list[dict[str, Any]]) -> list[str]:
    """What is more at the end than after the second tenth, when all that is made once has been made."""
    first, last = rows[1], rows[-1]
    torchs = OBJECTS_OF_TORCH.get(last["kind"], 0) * (last["groups"] - first["groups"])
    room = SLACK | {"objects": SLACK["objects"] + torchs, "rss_kib": SLACK["rss_kib"] + torchs // 4}
    return [f"{name}: {first[name]} -> {last[name]}" for name in room if last[name] > first[name] + room[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["init", "new_group"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=20000, help="at least 10")
    parser.add_argument("--json", type=Path, help="write one row a look to this file")
    options = parser.parse_args()
    worse, rows = False, []
    for kind in options.kind:
        print(f"{kind}, {options.world} ranks\n" + "  ".join(f"{name:>11}" for name in HEAD), flush=True)
        seen = run(kind, options)
        rows += seen
        for line in grown(seen):
            print(f"grew: {line}")
            worse = True
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
