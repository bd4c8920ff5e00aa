"""A GPU of the host for tests, as torch's device "privateuseone" (emulated_device.cc); ranks are threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ringlet import _C

DEVICE = "privateuseone"
BUILD = pathlib.Path(__file__).parents[2] / "build" / str(sys.implementation.cache_tag)
VARIABLES = ("RINGLET_CUDA_LIBRARY", "RINGLET_NCCL_LIBRARY")

# What collectives go through: RINGLET_PEER_MEMORY_BYTES.
WAYS = {"both": None, "NCCL": "0", "peer memory": str(1 << 60)}

needs_build = pytest.mark.skipif(_C.gpu_status()["state"] == "not built", reason="the build found no nvcc")

_lock = threading.Lock()


def load() -> None:
    """Before the process's first call on a GPU: ringlet keeps the libraries that it finds."""
    with _lock:
        _load()


@functools.cache
def _load() -> None:
    for name in VARIABLES:
        os.environ[name] = str(BUILD / "libemulated_gpu.so")
    try:
        torch.ops.load_library(BUILD / "libemulated_device.so")
        module = types.ModuleType(f"torch.{DEVICE}")
        module._lazy_init = lambda: None  # type: ignore[attr-defined]
        module.device_count = lambda: 1  # type: ignore[attr-defined]
        module.set_device = lambda number: None  # type: ignore[attr-defined]
        module.get_device_name = lambda number: "a GPU of the host"  # type: ignore[attr-defined]
        module.synchronize = lambda: torch.zeros(1, device=DEVICE).cpu()  # type: ignore[attr-defined]
        torch._register_device_module(DEVICE, module)
        sys.modules[module.__name__] = module
        probe = _C.Group.threads("live gpu", 0, 1, 60.0)
        _C.all_reduce(probe, *[torch.zeros(1, device=DEVICE)] * 2, "sum", "auto", 0, None, 1.0, False)
        probe.close(1.0)
    finally:
        for name in VARIABLES:
            del os.environ[name]


def use_own_stream() -> None:
    """The calling thread's operations go on a stream of its own from now on, until `use_default_stream`."""
    torch.ops.emulated_device.use_own_stream()


def use_default_stream() -> None:
    torch.ops.emulated_device.use_default_stream()


def library() -> ctypes.CDLL:
    """For what a test asks of it beyond what a GPU has (tests/cpp/emulated_gpu.h)."""
    return ctypes.CDLL(str(BUILD / "libemulated_gpu.so"))


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """As if all streams were being captured."""
    library().emulated_gpu_capture(True)
    try:
        yield
    finally:
        library().emulated_gpu_capture(False)


def go(rank: int, world: int, way: str) -> None:
    """Groups made in this process from now on take that way."""
    os.environ.pop("RINGLET_PEER_MEMORY_BYTES", None)
    if WAYS[way] is not None:
        os.environ["RINGLET_PEER_MEMORY_BYTES"] = str(WAYS[way])


def each_way(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test runs once for each of WAYS."""
    return pytest.mark.usefixtures("way")(pytest.mark.parametrize("way", WAYS, indirect=True)(test))


def filled(value: float, count: int = 1000) -> torch.Tensor:
    return torch.full((count,), value).to(DEVICE)
