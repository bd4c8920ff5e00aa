"""Hosts for tests: emulated (benchmarks.hosts) where this machine allows them; else a test skips and says why.

`python -m benchmarks bench --cluster` makes its hosts in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.clusters import Cluster
from benchmarks.hosts import Hosts, why_not


def require_hosts() -> None:
    """Skips the calling test where hosts cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@contextlib.contextmanager
def hosts(count: int, **settings: Any) -> Iterator[Hosts]:
    """`with hosts(4, ranks_per_host=2, uplink_mbit=200) as made`: the settings are Cluster's."""
    require_hosts()
    with Hosts(Cluster(count, **settings)) as made:
        yield made
