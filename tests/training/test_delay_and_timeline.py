"""What delay=1 excludes, and what the reducer tells of a step. Random trainings have the gradients themselves."""

import json

import pytest
import torch
from torch.distributed.algorithms.join import Join

from ranks import on
from reducer_checks import SMALL, assert_gradients, expected_average, loss_of, mlp
from refusals import refused
from ringlet import GradientReducer, InvalidUsage


@on("ranks")
def test_what_excludes_delay_is_refused(rank, world):
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": False}):
        refused("delay=1", GradientReducer, mlp(), delay=1, **options)
    refused(r"delay must be 0 \(off\) or 1", GradientReducer, mlp(), delay=2)
    with pytest.raises(InvalidUsage, match="leave out delay= or optimizer_in_backward="):
        GradientReducer(mlp(), delay=1, optimizer_in_backward=lambda p: torch.optim.SGD(p, lr=0.1))
    assert not GradientReducer(mlp()).flush()


@on("ranks")
def test_times_are_in_order(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    for step in range(3):
        loss_of(model, rank, step).backward()
    stats = reducer.stats()
    assert [row["bytes"] for row in stats["buckets"]] == stats["bucket_bytes"]
    assert [row["parameters"] for row in stats["buckets"]] == stats["bucket_parameters"]
    assert sorted(stats["ready_s"]) == stats["ready_s"] and len(stats["ready_s"]) == 6
    end = stats["backward_s"] + stats["exposed_s"] + 1e-9  # sums of seconds are rounded
    for row in stats["buckets"]:
        assert 0 < row["ready_s"] <= row["launched_s"] <= row["done_s"] <= end
        assert row["ready_s"] == max(stats["ready_s"][stats["ready_order"].index(name)] for name in row["parameters"])
    assert [row["launched_s"] for row in stats["buckets"]] == sorted(row["launched_s"] for row in stats["buckets"])
    assert stats["communication_s"] <= sum(row["done_s"] - row["launched_s"] for row in stats["buckets"]) + 1e-9
    assert 0 <= stats["overlapped_s"] <= stats["communication_s"]
    assert stats["total_communication_s"] >= stats["communication_s"] > 0
    assert stats["total_exposed_s"] >= stats["exposed_s"] > 0
    assert stats["launches"] == 3 * len(stats["buckets"])


@on("two")
def test_a_step_is_traced(rank, world, folder):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    loss_of(model, rank).backward()  # after which buckets are in the order of arrival
    with torch.profiler.profile() as profiler:
        loss_of(model, rank).backward()
    profiler.export_chrome_trace(f"{folder}/{rank}.json")
    with open(f"{folder}/{rank}.json") as file:
        traced = [event for event in json.load(file)["traceEvents"] if "GradientReducer:" in event.get("name", "")]
    sent = [event["name"] for event in sorted(traced, key=lambda event: event["ts"]) if "send" in event["name"]]
    assert sent == [f"GradientReducer: send bucket {n}" for n in range(len(reducer.stats()["buckets"]))]
    assert [event["name"] for event in traced if "wait" in event["name"]] == ["GradientReducer: wait for averages"]


@on(2, "dist:gloo")
def test_a_removed_reducer_refuses(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    merge = reducer.accumulate(1)
    loss_of(model, rank).backward()
    reducer.remove()
    for act in (
        lambda: reducer.accumulate(2),
        lambda: reducer.no_sync().__enter__(),
        lambda: reducer.join(),
        lambda: Join([reducer]),
        reducer.flush,
        merge.finish,
        lambda: reducer.register_comm_hook(None, print),
    ):
        refused("the reducer was removed: make a new one", act)
    reducer.remove()
    delayed = GradientReducer(model, delay=1, **SMALL)
    model.zero_grad()
    loss_of(model, rank).backward()
    delayed.remove()
    assert delayed.flush(), "the last averages are not lost"
    assert_gradients(model, expected_average(model, world))
    refused(r"flush\(\): the reducer was removed", delayed.flush)


@on(2, "dist:gloo")
def test_reprs_tell_the_state(rank, world):
    model = mlp()
    reducer = GradientReducer(model, find_unused_parameters=True, **SMALL)
    merge = reducer.accumulate(2)
    for state in ("1 of 2 micro-batches seen", "complete"):
        loss_of(model, rank).backward()
        assert repr(merge) == f"GradientMerge(k=2, average=True, {state})"
    told = ("Sequential", "6 parameters", f"rank {rank} of 2 on gloo", "bucket_mb=0.0005", "find_unused", repr(merge))
    assert all(part in repr(reducer) for part in told) and "static_graph" not in repr(reducer)
    assert "1 backwards reduced" in repr(reducer)
    reducer.remove()
    assert "removed" in repr(reducer)
