"""What a user is told: RINGLET_LOG's lines, the last calls in errors, events in torch.profiler."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringlet
from programs import printed, until
from ranks import on, on_host

LINE = re.compile(
    r"ringlet: \[rank (?P<rank>\d+)/(?P<world>\d+) (?P<host>[^ ]+):(?P<pid>\d+)( (?P<group>[^\]]+))?\] "
    r"\d\d:\d\d:\d\d\.\d{6} (?P<level>warning|info|debug): (?P<text>.+)"
)


@contextlib.contextmanager
def logged_group(rank, world, folder, level="info", transport="shared_memory", timeout=60.0):
    """A group whose lines go to one file a process in `folder`."""
    mixed = transport == "mixed"
    with (
        mock.patch.dict(os.environ, RINGLET_LOG=level, RINGLET_LOG_FILE=f"{folder}/%h.%p"),
        on_host(f"h{rank}" if mixed else None),
    ):
        store = dist.FileStore(f"{folder}/store", world)
        ringlet.init(rank, world, store, transport="auto" if mixed else transport, timeout=timeout, name="logged")
        try:
            yield ringlet.current()
        finally:
            ringlet.finalize()


def lines_of(folder, rank):
    """The parts of every line that this process has written."""
    (name,) = [name for name in os.listdir(folder) if name.endswith(f".{os.getpid()}")]
    with open(f"{folder}/{name}", encoding="utf-8") as file:
        lines = file.read().splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    assert all(int(match["rank"]) == rank and int(match["pid"]) == os.getpid() for match in found)
    return [match.groupdict() for match in found]


def texts(lines, level="info"):
    return [line["text"] for line in lines if line["level"] == level]


# --- levels


def test_lines_go_to_standard_error_where_they_are_asked_for(capfd):
    told = {}
    for level in ("info", "off"):
        with mock.patch.dict(os.environ, RINGLET_LOG=level):
            ringlet.init(0, 1, transport="threads", name=level)
            ringlet.all_reduce(torch.ones(3))
            ringlet.finalize()
        told[level] = capfd.readouterr()
    assert told["off"] == ("", "")
    out, err = told["info"]
    found = [LINE.fullmatch(line) for line in err.splitlines()]
    assert out == "" and found and all(found), err
    assert {match["level"] for match in found} == {"info"} and {match["rank"] for match in found} == {"0"}
    assert found[-1]["text"].startswith("group closed: 1 calls")


# --- what is told


def tell_info(rank, world, folder, transport):
    with logged_group(rank, world, folder, transport=transport):
        for _ in range(3):
            ringlet.all_reduce(torch.ones(1000))
        ringlet.all_reduce(torch.ones(4 << 20), algorithm="ring")
        ringlet.new_group(range(world)).close()
    return lines_of(folder, rank)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "mixed"])
def test_info_tells_who_where_how_and_why(pool, tmp_path, transport):
    for rank, lines in enumerate(pool.values(tell_info, 2, str(tmp_path), transport, join="nothing")):
        told = texts(lines)
        assert len(told) == len(lines)  # nothing but info
        all_told = "\n".join(told)
        name = {"mixed": r"shared_memory\+tcp", "tcp": "tcp"}.get(transport, "shared_memory")
        hosts = r"2 hosts: ranks 0 \| ranks 1" if transport == "mixed" else "one host"
        assert re.search(rf"group made in [\d.]+ m?s: {name}, {hosts}; rules: .*built-in", all_told), all_told
        assert {line["group"] for line in lines if line["group"]} == {"logged", "logged/0"}
        chosen = [text for text in told if text.startswith("all_reduce of")]
        assert len(chosen) == 2, chosen  # the first of each size
        assert re.fullmatch(r"all_reduce of 3.9 KiB: \w+ \(the built-in rules: all_reduce .*\), .*", chosen[0])
        assert chosen[1].startswith("all_reduce of 16 MiB: ring (named by the caller), "), chosen[1]
        assert re.search(r"\d+ segments of ", chosen[1])
        assert re.search(r"group closed: 4 calls, [\d.]+ MiB received", all_told)
        if transport == "mixed":
            assert {line["host"] for line in lines} == {f"h{rank}"}
        if transport != "shared_memory":
            assert re.search(r"listens at .*, port \d+", all_told)
            made = r"(connected to|accepted a connection from) rank \d \(collectives\): \S+:\d+ (->|<-) \S+:\d+"
            assert re.search(made, all_told), all_told


def tell_debug(rank, world, folder):
    with logged_group(rank, world, folder, level="debug"):
        ringlet.all_reduce(torch.ones(10))
        peer = 1 - rank
        ringlet.send(torch.ones(4), peer) if rank == 0 else ringlet.recv(torch.ones(4), peer)
        ringlet.recv(torch.ones(5), peer, async_op=True).wait() if rank == 0 else ringlet.send(torch.ones(5), peer)
        (call,) = ringlet.current().calls()
    return texts(lines_of(folder, rank), "debug"), call


def test_debug_tells_every_call_and_message(pool, tmp_path):
    for rank, (told, call) in enumerate(pool.values(tell_debug, 2, str(tmp_path), join="nothing")):
        assert "all_reduce #0 (auto, sum, float32, 10 elements) begins" in told
        assert any(re.fullmatch(r"all_reduce #0 done in [\d.]+ m?[us]s?: 40 B, \w+, 1 segment", text) for text in told)
        first = "send to rank 1" if rank == 0 else "recv from rank 0"
        assert f"{first} (float32, 4 elements) begins" in told and f"{first} (float32, 4 elements) done" in told
        if rank == 0:
            assert "recv from rank 1 (float32, 5 elements) is posted" in told
            assert "recv from rank 1 (float32, 5 elements) done" in told
        assert call["seconds"] > 0 and call["done"]


@on(2, "nothing")
def test_a_failure_is_told_once(rank, world, folder):
    refused = pytest.raises(ringlet.InvalidUsage, match="do not match")
    with logged_group(rank, world, folder, level="warning"), refused:
        ringlet.all_reduce(torch.ones(3 + rank))
    (line,) = lines_of(folder, rank)
    assert line["level"] == "warning" and re.match("InvalidUsage: .*calls do not match", line["text"])


# --- the last calls


def fail_after_calls(rank, world, what, stamp):
    for _ in range(5):
        ringlet.all_reduce(torch.ones(3))
    ringlet.barrier()
    if rank == 1:
        until(lambda: what != "stuck" or os.path.exists(stamp))
        return None
    kind = {"stuck": ringlet.Timeout, "left": ringlet.PeerLost}[what]
    with pytest.raises(kind) as caught:
        ringlet.broadcast(torch.ones(7), 1, timeout=0.5 if what == "stuck" else None)
    pathlib.Path(stamp).touch()
    with pytest.raises(kind, match=r"this group failed before: .*last calls: #6 broadcast"):
        ringlet.barrier()
    return str(caught.value), ringlet.current().calls()


@pytest.mark.parametrize(("what", "transport"), [("left", "shared_memory"), ("stuck", "tcp")])
def test_errors_end_with_the_last_calls(pool, tmp_path, transport, what):
    (text, calls), _ = pool.values(fail_after_calls, 2, what, str(tmp_path / "stamp"), join=transport)
    ended = text[text.index("; last calls: ") :]
    assert ended == (
        "; last calls: #6 broadcast (auto, float32, 7 elements, root 1) unfinished; #5 barrier (auto) done; "
        "#0..#4 all_reduce (auto, sum, float32, 3 elements) done"
    )
    assert text.count("last calls") == 1
    assert [call["sequence"] for call in calls] == [0, 1, 2, 3, 4, 5, 6]
    assert [call["done"] for call in calls] == 6 * [True] + [False]
    assert calls[0]["op"] == "sum" and calls[0]["algorithm"] is not None and calls[0]["named"] is None
    assert calls[6]["root"] == 1 and calls[6]["op"] is None and calls[6]["count"] == 7


# --- torch.profiler


def ringlets_events(profiler, path):
    profiler.export_chrome_trace(path)
    events = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("name", "").startswith("ringlet:")]


def profiled(rank, world, path):
    small, large = torch.ones(10), torch.ones(1 << 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        ringlet.all_reduce(small)
        ringlet.all_reduce(large, algorithm="ring", async_op=True).wait()
        ringlet.all_gather([torch.ones(2) for _ in range(world)], torch.ones(2))
        ringlet.send(small, 1) if rank == 0 else ringlet.recv(small, 0)
    return ringlets_events(profiler, f"{path}/{rank}.json")


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_calls_are_in_a_trace(pool, tmp_path, transport):
    for rank, events in enumerate(pool.values(profiled, 2, str(tmp_path), join=transport)):
        named = {}
        for event in events:
            named.setdefault(event["name"], []).append(event)
        calls = named["ringlet:all_reduce"]
        assert [event["args"]["Input Dims"][0] for event in calls] == [[10], [1 << 20]]
        assert {"ringlet:all_gather", "ringlet:send" if rank == 0 else "ringlet:recv"} <= named.keys()
        how = "in messages" if transport == "tcp" else "staged"
        (ring,) = named[f"ringlet:ring, {how}"]
        call = calls[1]
        assert call["ts"] <= ring["ts"] and ring["ts"] + ring["dur"] <= call["ts"] + call["dur"] + 1


@on(2, "dist:ringlet")
def test_calls_of_torch_distributed_are_in_a_trace(rank, world, folder):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    names = [event["name"] for event in ringlets_events(profiler, f"{folder}/{rank}.json")]
    assert names.count("ringlet:all_reduce") == 2
    assert sum(name.endswith(", staged") for name in names) == 2, names


LATE = """
import sys, torch, ringlet, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

dist.init_process_group("ringlet")
group = ringlet.Group.of(dist.group.WORLD)

def call(way):
    return way(torch.ones(4), async_op=True)

def ours(tensor, async_op):
    return ringlet.all_reduce(tensor, group=group, async_op=async_op)

def message(tensor, async_op):
    return dist.isend(tensor, 1) if dist.get_rank() == 0 else dist.irecv(tensor, 0)

for way in (dist.all_reduce, ours, message) * 3:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        works = [call(way) for _ in range(20)] if dist.get_rank() == 0 else []
    assert len(profiler.events()) > 0 or dist.get_rank() == 1
    del profiler
    others = [torch.ones(k) for k in range(300)]
    ringlet.monitored_barrier()
    works += [call(way) for _ in range(20)] if dist.get_rank() == 1 else []
    for work in works:
        work.wait()
dist.destroy_process_group()
"""


def test_calls_that_complete_after_the_profiler_has_stopped(tmp_path):
    """torch has freed what it recorded. MALLOC_PERTURB_ fills freed memory."""
    program = tmp_path / "late.py"
    program.write_text(LATE)
    printed(sys.executable, "-m", "ringlet", "run", "-n", 2, program, env=os.environ | {"MALLOC_PERTURB_": "165"})


# --- reducers


@on(2, "nothing")
def test_a_reducer_tells_its_buckets(rank, world, folder):
    with mock.patch.dict(os.environ, RINGLET_LOG="info", RINGLET_LOG_FILE=f"{folder}/%h.%p"):
        dist.init_process_group("ringlet", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
        try:
            model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
            ringlet.GradientReducer(model, bucket_mb=0.3, first_bucket_mb=0.1)
            for _ in range(2):
                model(torch.ones(2, 300)).sum().backward()
        finally:
            dist.destroy_process_group()
    told = texts(lines_of(folder, rank))
    buckets = [text for text in told if text.startswith("GradientReducer: 4 parameters in buckets")]
    assert [re.search(r"buckets (.*): [\d., ]+ MiB$", text)[1] for text in buckets] == [
        "by size",
        "in the order of arrival",
    ]
