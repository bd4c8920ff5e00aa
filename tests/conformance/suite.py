"""torch's `DistributedTest` suite as a class of this process's backend and world, its gates open.

The suite reads BACKEND, WORLD_SIZE, TEMP_DIR and INIT_METHOD from the environment while it is imported, so a process
serves one backend and one world. `run.py` sets them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import DistTestCases

import gates

NAME = "torch.testing._internal.distributed.distributed_test"
BACKEND = os.environ["BACKEND"]
END_SECONDS = 5.0

BACKEND_MODULE = importlib.import_module(BACKEND) if BACKEND not in dist.Backend.backend_list else None
if BACKEND_MODULE:
    # torch's own refuses every name but gloo before it looks at the backend.
    dist.monitored_barrier = BACKEND_MODULE.monitored_barrier


def load() -> types.ModuleType:
    """The suite's module, with gates open for this backend."""
    # Decorators ask these lists while the module is imported.
    for feature in gates.FEATURES:
        DistTestCases.backend_feature[feature].add(BACKEND)
    spec = importlib.util.find_spec(NAME)
    assert spec and spec.origin, NAME
    with open(spec.origin, encoding="utf-8") as file:
        code = gates.opened(file.read(), spec.origin)
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(open_gate=gates.open_gate, open_name=gates.open_name)
    sys.modules[NAME] = module
    exec(code, module.__dict__)
    return module


_torchs = load()


class Conformance(_torchs.TestDistBackend, _torchs.DistributedTest._DistTestBase):  # type: ignore[name-defined]
    """Every test starts its ranks as processes of their own, and leaves none behind.

    They are forked from this process, which has imported torch but never ran any of it, where torch's harness would
    spawn: a rank begins as it would there, without the seconds that the import takes. START_METHOD=spawn does as torch.
    """

    def setUp(self) -> None:
        super().setUp()
        context = torch.multiprocessing.get_context(os.environ.get("START_METHOD", "fork"))
        self._started: list[Any] = []
        self._start_processes(context.Process)
        self._started = list(self.processes)

    def tearDown(self) -> None:
        super().tearDown()
        for process in self._started:
            process.join(END_SECONDS)
            process.kill()
            process.join()
