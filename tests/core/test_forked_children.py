"""A rank forks: its children have a copy of its group, and neither their calls nor their end reach the group itself. A
rank ends while a thread of it makes calls."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from ranks import LIMITED, TRANSPORTS

PROGRAM = pathlib.Path(__file__).parents[1] / "support/forking_rank.py"
LIMIT_SECONDS = 120


@pytest.mark.parametrize("use", ["loader", "pending calls", "beside calls", "exit beside calls"])
@pytest.mark.parametrize("transport", [transport for transport in TRANSPORTS if transport != "threads"])
def test_the_group_goes_on(tmp_path, transport, use):
    world = 3 if transport == "mixed" else 2
    carrier = "auto" if transport == "mixed" else transport
    ranks = []
    for rank in range(world):
        host = {"RINGLET_HOST_ID": f"host {rank % 2}"} if transport == "mixed" else {}
        command = [sys.executable, str(PROGRAM), str(rank), str(world), str(tmp_path / "store"), carrier, use]
        ranks.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **LIMITED, **host},
            )
        )
    try:
        texts = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    wrong = [f"rank {q}, exit code {rank.returncode}: {texts[q]}" for q, rank in enumerate(ranks) if rank.returncode]
    assert not wrong, "\n".join(wrong)
