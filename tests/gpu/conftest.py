"""The suite's rank processes, on a machine with an NVIDIA GPU; `make gpu-check` sets the paths."""

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()
