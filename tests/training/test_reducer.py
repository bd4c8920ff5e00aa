"""The gradient reducer against DDP, single-process training and hand-made averages, on gloo and on ringlet.

Importing torch takes seconds, so each backend and world is spawned once and runs every check of the two lists; a
test looks up how its check went on all ranks.
"""

import json
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import reducer_refusal_checks  # noqa: F401  (joins the list)
from ranks import leave_torch
from reducer_checks import CHECKS


def run_checks(rank: int, world: int, backend: str, folder: str) -> None:
    import traceback

    import ringlet  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    outcomes = {}
    for name, check in CHECKS.items():
        torch.manual_seed(rank)
        try:
            check(rank, world)
            outcomes[name] = ""
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(outcomes, file)
    leave_torch(backend)
    if backend == "gloo":
        os._exit(0)  # a thread of gloo's that lets go of a tensor while Python finalizes aborts the process


@pytest.fixture(
    scope="module", params=[("gloo", 2), ("gloo", 3), ("ringlet", 2), ("ringlet", 3)], ids="{0[0]}-{0[1]}".format
)
def outcomes(request, tmp_path_factory):
    backend, world = request.param
    folder = tmp_path_factory.mktemp(f"{backend}{world}")
    torch.multiprocessing.spawn(run_checks, (world, backend, str(folder)), nprocs=world)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("name", CHECKS)
def test_reducer(outcomes, name):
    failures = {rank: result[name] for rank, result in enumerate(outcomes) if result[name]}
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
