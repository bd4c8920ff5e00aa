"""Merging by measurement: the cuts are the best of the model, the model is fitted right, all ranks choose the same."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from ranks import on
from reducer_checks import assert_step, mlp
from refusals import refused
from ringlet import GradientReducer
from ringlet.training.call_labels import BucketLabels
from ringlet.training.reducer.merging import LATER, Cost, cut, cut_with_few, end_of, fit

MEASURED = 7  # where the layouts are the same, that decides
DECIDED = 25  # reduced backwards, as GradientReducer's docstring says


def all_cuts(count):
    for marks in itertools.product((False, True), repeat=count - 1):
        groups = [[0]]
        for index, split in enumerate(marks, 1):
            if split:
                groups.append([index])
            else:
                groups[-1].append(index)
        yield groups


def cases(count):
    generator = random.Random(7)
    for _ in range(count):
        n = generator.randint(1, 9)
        ready_s = list(itertools.accumulate(generator.choice((0.0, generator.random())) for _ in range(n)))
        nbytes = [generator.randint(0, 3000) for _ in range(n)]
        yield ready_s, nbytes, Cost(generator.choice((0.0, 2 * generator.random())), generator.random() / 1000)


def test_cuts_are_the_earliest_of_all():
    for ready_s, nbytes, cost in cases(400):
        found = cut(ready_s, nbytes, cost)
        assert [index for group in found for index in group] == list(range(len(ready_s)))
        earliest = min(end_of(groups, ready_s, nbytes, cost) for groups in all_cuts(len(ready_s)))
        assert end_of(found, ready_s, nbytes, cost) == pytest.approx(earliest, rel=1e-12)


def test_cuts_at_the_ends_of_the_scale():
    ready_s, nbytes = [0.1, 0.2, 0.3, 0.4], [100] * 4
    assert cut(ready_s, nbytes, Cost(10.0, 0.0)) == [[0, 1, 2, 3]]  # a start costs more than all waiting
    slow = cut(ready_s, nbytes, Cost(0.0, 1.0))  # starts are free, the wire is the limit: begin at once
    assert slow[0] == [0] and end_of(slow, ready_s, nbytes, Cost(0.0, 1.0)) == pytest.approx(0.1 + 400)
    assert cut([], [], Cost(1, 1)) == []


def test_fewer_cuts_end_nearly_as_early():
    for ready_s, nbytes, cost in cases(400):
        best, found = cut(ready_s, nbytes, cost), cut_with_few(ready_s, nbytes, cost)
        assert [index for group in found for index in group] == list(range(len(ready_s)))
        assert len(found) <= len(best)
        assert end_of(found, ready_s, nbytes, cost) <= LATER * end_of(best, ready_s, nbytes, cost)
    # Many small gradients, one after another: nearly as early with far fewer starts.
    ready_s, nbytes, cost = [0.01 * i for i in range(1, 401)], [1000] * 400, Cost(0.005, 5e-6)
    assert len(cut_with_few(ready_s, nbytes, cost)) < len(cut(ready_s, nbytes, cost)) / 5


def test_end_of_is_the_papers_recursion():
    # g0 and g1 wait for g1 (2.0), take 1 + 3; g2 is ready at 3.0 but the wire is free at 6.0
    assert end_of([[0, 1], [2]], [0.5, 2.0, 3.0], [10, 20, 5], Cost(1.0, 0.1)) == pytest.approx(2.0 + 4.0 + 1.5)


def test_the_line_is_found_again():
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
    found = fit(sizes, [3e-5 + 2e-10 * n for n in sizes])
    assert found.alpha_s == pytest.approx(3e-5) and found.beta_s == pytest.approx(2e-10)
    assert fit(sizes, [1e-3] * 4) == Cost(1e-3, 0.0)
    assert fit(sizes, [4e-3, 3e-3, 2e-3, 1e-3]).beta_s == 0.0
    through_zero = fit(sizes, [1e-9 * n**1.2 for n in sizes])
    assert through_zero.alpha_s == 0.0 and through_zero.beta_s > 0


@on("ranks")
def test_layouts_change_and_gradients_do_not(rank, world):
    """Through all turns gradients are right, `.grad` moves with its bucket, and every rank keeps the same layout."""
    model = mlp()
    reducer = GradientReducer(model, bucket_mb="measured", first_bucket_mb=0.0002)
    assert reducer.stats()["merging"] == {"kept": None}
    for step in range(DECIDED + 2):
        kept = reducer.stats()["merging"]["kept"]
        assert kept is None if step < MEASURED else kept == "plain" or step >= DECIDED or kept is None
        assert step < DECIDED or kept
        assert_step(model, rank, world, step)
        stats = reducer.stats()
        everyone = [None] * world
        dist.all_gather_object(everyone, (stats["bucket_parameters"], stats["merging"]))
        assert all(other == everyone[0] for other in everyone)
    merging = reducer.stats()["merging"]
    assert merging["cost"]["alpha_s"] >= 0 and merging["cost"]["beta_s"] >= 0
    assert merging["predicted_s"]["merged"] <= LATER * merging["predicted_s"]["plain"]
    assert len(reducer.stats()["bucket_bytes"]) == merging["buckets"][merging["kept"]]
    if "measured_s" in merging:
        measured = merging["measured_s"]
        assert merging["kept"] == ("merged" if measured["merged"] < 0.98 * measured["plain"] else "plain")


@on("ranks")
def test_the_slower_layout_is_dropped(rank, world):
    """A hand-made clock: whatever the model predicts, what was measured decides, and the largest rank's times count."""
    from ringlet.training.reducer import buckets
    from ringlet.training.reducer.channel import Channel
    from ringlet.training.reducer.measured import MeasuredMerging
    from ringlet.training.reducer.timeline import Timeline

    for slower in ("plain", "merged"):
        entries = [buckets.Entry(f"p{i}", 1000, 4, "float32", "cpu") for i in range(6)]
        plain = buckets.assign(entries, buckets.Caps(4000, 4000))
        merging = MeasuredMerging(
            entries, Channel(dist.group.WORLD, None, BucketLabels("a test", [])), torch.device("cpu")
        )
        plan = plain
        while merging.kept is None:
            second = 1_000_000_000
            arrivals = {5 - i: i * (1000 if plan == plain else 1) for i in range(6)}
            late = (plan == plain) == (slower == "plain")
            took = second * (3 if late and rank == 1 else 2 if late or rank else 1)
            plan = merging.observe(Timeline(0, arrivals, ended_ns=6000, finished_ns=took), plan) or plan
        assert merging.kept == {"plain": "merged", "merged": "plain"}[slower]
        assert (plan == plain) == (merging.kept == "plain")
        assert merging.describe()["measured_s"] == {slower: 3.0, merging.kept: 2.0}


@on("ranks")
def test_what_cannot_be_measured_is_refused(rank, world):
    for options, message in [
        ({"bucket_mb": "large"}, "a number of MiB above 0 or 'measured'"),
        ({"bucket_mb": "measured", "delay": 1}, r"with delay=1 there is none"),
        ({"bucket_mb": "measured", "find_unused_parameters": True}, "with find_unused_parameters=True there is none"),
    ]:
        refused(message, GradientReducer, mlp(), **options)
