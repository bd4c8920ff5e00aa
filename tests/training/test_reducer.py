"""The gradient reducer against DDP, single-process training and hand-made averages, on gloo and on ringlet.

A group of each backend and world runs every check of the list; a test looks up how its check went on all ranks.
"""

import traceback

import pytest
import torch

from reducer_checks import CHECKS


def run_checks(rank: int, world: int) -> dict[str, str]:
    """What each check raised; empty where it passed."""
    outcomes = {}
    for name, check in CHECKS.items():
        torch.manual_seed(rank)
        try:
            check(rank, world)
            outcomes[name] = ""
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.fixture(
    scope="module", params=[("gloo", 2), ("gloo", 3), ("ringlet", 2), ("ringlet", 3)], ids="{0[0]}-{0[1]}".format
)
def outcomes(request, pool):
    backend, world = request.param
    return pool.values(run_checks, world, join=f"dist:{backend}", timeout=30)


@pytest.mark.parametrize("name", CHECKS)
def test_reducer(outcomes, name):
    failures = {rank: result[name] for rank, result in enumerate(outcomes) if result[name]}
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
