"""The example and the memory measurement of ZeRO run, and what they print holds."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(program, *arguments):
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_trains_alike_at_every_stage():
    lines = run("examples/zero.py", "--quick", "--steps", 6).splitlines()
    rows = {line[:12].strip(): [float(word) for word in line[12:].split()] for line in lines[1:4]}
    assert list(rows) == ["stage 1", "stage 2", "stage 3"]
    first, last = rows["stage 1"][:2]
    assert last < first
    assert all(row[:2] == [first, last] for row in rows.values())
    totals = [row[-2] for row in rows.values()]
    assert totals == sorted(totals, reverse=True) and abs(totals[0] / 10 - 1) < 0.03  # 4 + 12 / 2


def test_the_example_takes_deepspeeds_settings(tmp_path):
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
    run("benchmarks/zero_memory.py", "--worlds", "2", "--width", 128, "--layers", 2, "--json", rows, "--report", page)
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["stage"] for row in measured] == [1, 2, 3]
    for row in measured:
        assert abs(row["counted_bytes"] / row["predicted_bytes"] - 1) < 0.03
        assert abs(row["told_bytes"] / row["predicted_bytes"] - 1) < 0.03
    assert page.read_text().count("| 2 | ") == 3
