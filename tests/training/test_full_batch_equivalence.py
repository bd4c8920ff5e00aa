"""Training with the reducer is training on the full batch; the example programs run; bits do not depend on buckets."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from ranks import on
from ringlet import GradientReducer

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 6


def the_demos_model():
    """A small one in float64 and its text; the same on every rank."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    from char_transformer import CharTransformer, Size, Text, loss_of

    text, size = Text(), Size(width=32, layers=2, context=16, batch=4)
    torch.manual_seed(1)
    return CharTransformer(text.vocabulary, size).double(), lambda step, rank: text.batch(size, step, rank), loss_of


@on("ranks")
@pytest.mark.parametrize(
    "options",
    [
        {"bucket_mb": 0.05, "first_bucket_mb": 0.01},
        {"static_graph": True, "gradient_as_bucket_view": False, "bucket_mb": 0.05},
        {"find_unused_parameters": True, "bucket_mb": 0.05},
        {"bucket_mb": "measured"},
    ],
    ids=lambda options: "-".join(options),
)
def test_curve_equals_the_full_batchs(rank, world, options):
    """Mean losses and parameters after every step, against one process on all ranks' batches at once."""
    model, batch, loss_of = the_demos_model()
    alone, _, _ = the_demos_model()
    GradientReducer(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, alone)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, *batch(step, rank))
        loss.backward()
        parts = zip(*(batch(step, r) for r in range(world)), strict=True)
        full = loss_of(alone, *(torch.cat(part) for part in parts))
        full.backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, full.detach(), rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def run(*words: str) -> str:
    program = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["ringlet", "gloo"])
def test_the_reducers_example(backend, tmp_path):
    words = ["--quick", "--steps", "11", "--backend", backend, "--bucket-mb", "0.1"]
    if backend == "ringlet":
        words += ["--trace", str(tmp_path / "step.json")]
    printed = run("examples/gradient_reducer.py", *words)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert "the last step: backward" in printed
    if backend == "ringlet":
        names = {event.get("name") for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]}
        assert {"GradientReducer: send bucket 0", "GradientReducer: wait for averages"} <= names


def test_the_merge_example():
    printed = run("examples/gradient_merge.py", "-k", "3", "--micro-batches", "5")
    assert "10 micro-batches, 3 a step: 4 reductions" in printed


def test_bits_do_not_depend_on_bucket_sizes(tmp_path):
    """7 MiB of gradients in buckets of 1 to 100 MiB. The ring, of several trees, shows that bits can."""
    sizes = ["--sizes", "1", "4", "5", "6", "100"]
    run("benchmarks/bucket_bits.py", "--layers", "7", *sizes, "--json", str(tmp_path / "bits.json"))
    found = json.loads((tmp_path / "bits.json").read_text())
    assert found["same_bits"]["reducer, two_shot"] and found["same_bits"]["reducer, butterfly"]
    assert not found["same_bits"]["reducer, ring"]
    assert all(len(digests) == 5 for digests in found["digests"].values())


def test_the_benchmark_of_steps(tmp_path):
    words = ["--quick", "--turns", "2", "--merging-backends", "ringlet"]
    run("benchmarks/reducer_step.py", *words, "--json", str(tmp_path / "a.jsonl"), "--report", str(tmp_path / "a.md"))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["way"] for row in rows[:3]] == ["reducer on ringlet", "DDP on ringlet", "DDP on gloo"]
    assert len(rows) == 3 + 2 * 3 and all(row["step_ms"] > 0 and row["turns"] == 2 for row in rows)
    assert all(row["merging"]["kept"] in ("plain", "merged") for row in rows[3::2])
    meta = json.loads((tmp_path / "a.meta.json").read_text())
    assert meta["command"].startswith("benchmarks/reducer_step.py --quick")
    assert meta["machine"]["cores"] >= 1 and meta["commit"]
    page = (tmp_path / "a.md").read_text()
    assert meta["commit"] in page and page.count("| transformer |") == 5 + ("cost" in rows[7]["merging"])


def test_the_benchmark_of_all_ways_to_train(tmp_path):
    out = run("benchmarks/step.py", "--models", "quick", "--turns", "2", "--json", str(tmp_path / "a.jsonl"))
    rows = {row["way"]: row for row in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())}
    assert {"none", "naive", "ddp-gloo", "ddp-ringlet", "reducer", "zero-3", "fsdp2-3"} <= set(rows)
    assert all(row["step_ms"] > 0 and row["turns"] == 2 for row in rows.values())
    assert rows["none"]["step_over_ms"] == 0
    assert "over none ms" in out


def test_the_benchmark_of_reproducible_training(tmp_path):
    """Which fails by itself where reproducible=True does not give one digest of a model."""
    words = ["--quick", "--steps", "6", "--turns", "2", "--json", str(tmp_path / "a.jsonl")]
    page = run("benchmarks/reproducible.py", *words, "--report", str(tmp_path / "a.md"))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    digests = [row for row in rows if "digests" in row]
    assert len(digests) == 2 * (6 * 5 + 2 * 4) and len(rows) == len(digests) + 2 * 2
    assert {row["ranks"] for row in digests if row["reproducible"]} == {"1", "2", "4", "8", "4, then 2"}
    for model in ("demo", "frozen batch norm"):
        mine = [row for row in digests if row["model"] == model]
        (same,) = {digest for row in mine if row["reproducible"] for digest in row["digests"]}
        ddp = {digest for row in mine if row["way"] == "DDP" for digest in row["digests"]}
        assert len(ddp) > 1 and same in page
