"""The example and benchmark programs of training run, and what they print holds."""

import json
import os
import pathlib
import sys

import pytest

from programs import printed

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(program, *arguments):
    """program: a file, or a module of benchmarks."""
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [str(ROOT / program)] if program.endswith(".py") else ["-m", program]
    return printed(sys.executable, *words, *arguments, timeout=300, env=environment, cwd=ROOT)


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
    run("benchmarks.bucket_bits", "--layers", "7", *sizes, "--json", str(tmp_path / "bits.json"))
    found = json.loads((tmp_path / "bits.json").read_text())
    assert found["same_bits"]["reducer, two_shot"] and found["same_bits"]["reducer, butterfly"]
    assert not found["same_bits"]["reducer, ring"]
    assert all(len(digests) == 5 for digests in found["digests"].values())


def test_the_benchmark_of_steps(tmp_path):
    words = ["--quick", "--turns", "2", "--merging-backends", "ringlet"]
    run("benchmarks.reducer_step", *words, "--json", str(tmp_path / "a.jsonl"), "--report", str(tmp_path / "a.md"))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["way"] for row in rows[:3]] == ["reducer on ringlet", "DDP on ringlet", "DDP on gloo"]
    assert len(rows) == 3 + 2 * 3 and all(row["step_ms"] > 0 and row["turns"] == 2 for row in rows)
    assert all(row["merging"]["kept"] in ("plain", "merged") for row in rows[3::2])
    meta = json.loads((tmp_path / "a.meta.json").read_text())
    assert meta["command"].startswith("python -m benchmarks.reducer_step --quick")
    assert meta["machine"]["cores"] >= 1 and meta["commit"]
    page = (tmp_path / "a.md").read_text()
    assert meta["commit"] in page and page.count("| transformer |") == 5 + ("cost" in rows[7]["merging"])


def test_the_benchmark_of_all_ways_to_train(tmp_path):
    words = ["--models", "quick", "--turns", "2", "--json", str(tmp_path / "a.jsonl")]
    out = run("benchmarks.step", *words, "--report", str(tmp_path))
    rows = {row["way"]: row for row in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())}
    assert {"none", "naive", "ddp-gloo", "ddp-ringlet", "reducer", "zero-3", "fsdp2-3"} <= set(rows)
    assert all(row["step_ms"] > 0 and row["turns"] == 2 for row in rows.values())
    assert rows["none"]["step_over_ms"] == 0
    (page,) = tmp_path.glob("*-step.md")
    table = [line for line in page.read_text().splitlines() if line.startswith("| zero-3 |")]
    assert len(table) == 1 and table[0] in out


def test_the_benchmark_of_reproducible_training(tmp_path):
    """Which fails by itself where reproducible=True does not give one digest of a model."""
    words = ["--quick", "--steps", "6", "--turns", "2", "--json", str(tmp_path / "a.jsonl")]
    page = run("benchmarks.reproducible", *words, "--report", str(tmp_path / "a.md"))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    digests = [row for row in rows if "digests" in row]
    assert len(digests) == 2 * (6 * 5 + 2 * 4) and len(rows) == len(digests) + 2 * 2
    assert {row["ranks"] for row in digests if row["reproducible"]} == {"1", "2", "4", "8", "4, then 2"}
    for model in ("demo", "frozen batch norm"):
        mine = [row for row in digests if row["model"] == model]
        (same,) = {digest for row in mine if row["reproducible"] for digest in row["digests"]}
        ddp = {digest for row in mine if row["way"] == "DDP" for digest in row["digests"]}
        assert len(ddp) > 1 and same in page


def test_zeros_example_trains_alike_at_every_stage():
    lines = run("examples/zero.py", "--quick", "--steps", 6).splitlines()
    rows = {line[:12].strip(): [float(word) for word in line[12:].split()] for line in lines[1:4]}
    assert list(rows) == ["stage 1", "stage 2", "stage 3"]
    first, last = rows["stage 1"][:2]
    assert last < first
    assert all(row[:2] == [first, last] for row in rows.values())
    totals = [row[-2] for row in rows.values()]
    assert totals == sorted(totals, reverse=True) and abs(totals[0] / 10 - 1) < 0.03  # 4 + 12 / 2


def test_zeros_example_takes_deepspeeds_settings(tmp_path):
    path = tmp_path / "ds_config.json"
    config = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1e6,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    path.write_text(json.dumps(config))
    lines = run("examples/zero.py", "--quick", "--steps", 4, "--settings", path).splitlines()
    name, first, last = lines[1].split()[:3]
    assert name == "ds_config.json" and float(last) < float(first)
    assert list(tmp_path.iterdir()) == [path]


def test_the_measurement_of_memory(tmp_path):
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    run("benchmarks.zero_memory", "--worlds", "2,4", "--width", 128, "--layers", 2, "--json", rows, "--report", page)
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["stage"] for row in measured] == [1, 2, 3] * 2
    for row in measured:
        assert abs(row["counted_bytes"] / row["predicted_bytes"] - 1) < 0.03
        assert abs(row["told_bytes"] / row["predicted_bytes"] - 1) < 0.03
    assert page.read_text().count("\n| 2 | ") == page.read_text().count("\n| 4 | ") == 3
