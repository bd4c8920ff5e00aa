"""Frameworks train on ringlet as on gloo: two ranks, every step's loss the same bits.

`make test-frameworks` installs them in an environment of their own, and runs this there. With two ranks a sum has one
order, so that nothing may differ.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys

import pytest

from programs import printed

HERE = pathlib.Path(__file__).parent
FRAMEWORKS = ("accelerate", "lightning", "transformers", "deepspeed")


def losses(framework: str, backend: str, folder: pathlib.Path) -> list[list[float]]:
    """What each rank saw."""
    folder.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(HERE / "train_with.py"), framework, backend, str(folder)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    printed(*launch, *program, timeout=300, env=environ, cwd=folder)
    told = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]
    assert [one["backend"] for one in told] == [backend] * 2
    return [one["losses"] for one in told]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_are_those_of_gloo(framework, tmp_path):
    ringlets, gloos = (losses(framework, backend, tmp_path / backend) for backend in ("ringlet", "gloo"))
    assert ringlets == gloos
    first, second = ringlets
    assert first == second or (framework == "transformers" and second == [])  # its rank 0 alone keeps a log
    assert len(first) == 8 and first[-1] < first[0] and all(map(math.isfinite, first))


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_zero_trains_and_clips_as_one_process_does(framework, tmp_path):
    first, second = losses(f"zero_{framework}", "ringlet", tmp_path / "zero")
    alone, _ = losses("zero_alone", "gloo", tmp_path / "alone")
    assert first == second and len(first) == 8 and first[-1] < first[0]
    assert first == pytest.approx(alone, rel=1e-5)
