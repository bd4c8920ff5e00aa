"""A rank's work: wait for the controller, prepare a case, time it, answer. The same code serves every library.

**How a call is timed.** A *sample* is a batch of calls, back to back, between two readings of the clock, divided by
their number. With batches, the clock (some 50 ns) does not count in small calls. From 20 µs on a batch is one call. A
rank reports the minimum, median and 99th percentile of its samples. A result is the *maximum over ranks* of each
(nccl-tests averages over ranks). Before the samples the ranks meet at their own library's barrier and make one batch
untimed.

In place, a call of a timed loop reduces the result of the previous call, as in nccl-tests. Sums grow until they
overflow, which costs nothing. They do not start from zeros, because some processors treat lines of zeros specially.

While a rank waits for its turn, it is blocked in a read. So its library's way of waiting does not matter then.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any, Protocol

import numpy as np

from . import data
from .case import KEEP_BYTES, Case, buffer_elements
from .probe import Prober

_PR_SET_PDEATHSIG = 1


class Library(Protocol):
    """One library, on one rank. `compares`: its result is the collective's, and is checked."""

    compares: bool
    out_of_place: bool  # has an all-reduce into another buffer
    finish: Callable[[], object] | None  # waits for calls that return before they are done
    rank: int
    transport: str
    version: str

    def refusal(self, case: Case) -> str | None:
        """Why this library cannot run the case, the same on all ranks, or None."""

    def allocate(self, elements: int, case: Case) -> Any: ...

    def write(self, buffer: Any, table: np.ndarray) -> None:
        """Repeat the table over the buffer."""

    def read(self, buffer: Any) -> np.ndarray: ...

    def bind(self, case: Case, source: Any, output: Any) -> Callable[[], object]:
        """The call to time, with bound arguments. `output` is None in place, and if a rank receives nothing."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class Rank:
    """Answers the controller's commands for one library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._buffers: dict[tuple[str, int, str, str], Any] = {}
        self._call: Callable[[], object] = lambda: None
        self._bytes = 0

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        """Fills fresh data, makes one checked call, warms up. Answers with the time of a call, in µs."""
        case, library = Case(**command["case"]), self._library
        refusal = library.refusal(case)
        if refusal:
            return {"refused": refusal}
        source, output = self._take_buffers(case)
        if source is not None:
            library.write(source, data.input_table(case, library.rank, command["seed"]))
        self._call = library.bind(case, source, output)
        library.barrier()
        self._call()
        if library.finish:
            library.finish()
        wrong = None
        if command["check"] and library.compares:
            result = source if output is None else output
            segments = data.expected(case, library.rank, command["seed"])
            tolerance = 4e-3 if case.op == "avg" else 0.0
            wrong = data.count_wrong(library.read(result), segments, tolerance) if segments else 0
        library.barrier()
        warm = samples_us(self._call, command["warmup"], 1, library.finish)
        return {"estimate_us": float(np.median(warm[len(warm) // 2 :])), "wrong": wrong, "transport": library.transport}

    def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        """Time the prepared call."""
        self._library.barrier()
        for _ in range(command["batch"]):
            self._call()
        if self._library.finish:
            self._library.finish()
        spent = np.sort(samples_us(self._call, command["samples"], command["batch"], self._library.finish))
        if self._bytes >= KEEP_BYTES:
            self._forget()
        last = len(spent) - 1
        return {"min": spent[0], "p50": spent[last // 2], "p99": spent[-(-last * 99 // 100)]}

    def _forget(self) -> None:
        self._call = lambda: None
        self._buffers.clear()

    def _take_buffers(self, case: Case) -> tuple[Any, Any]:
        """The case's buffers. Takes those of the last case if they fit, so that algorithms of one size share them."""
        wanted = {}
        for role, elements in zip(("input", "output"), buffer_elements(case, self._library.rank), strict=True):
            if elements:
                wanted[role] = (role, elements, case.dtype, case.memory)
        # Ordinary and registered buffers of one size live side by side.
        sizes = {(key[1], key[2]) for key in wanted.values()}
        if any((key[1], key[2]) not in sizes for key in self._buffers):
            self._forget()
        self._bytes = case.bytes
        for key in wanted.values():
            if key not in self._buffers:
                self._buffers[key] = self._library.allocate(key[1], case)
        found = {role: self._buffers[key] for role, key in wanted.items()}
        return found.get("input"), found.get("output")


def samples_us(
    call: Callable[[], object], samples: int, batch: int, finish: Callable[[], object] | None
) -> list[float]:
    """Microseconds per call, of each sample of `batch` calls."""
    clock, spent = time.perf_counter_ns, [0] * samples
    gc.collect()
    gc.disable()
    try:
        for index in range(samples):
            start = clock()
            for _ in itertools.repeat(None, batch):
                call()
            if finish:
                finish()
            spent[index] = clock() - start
    finally:
        gc.enable()
    return [ns / (1000 * batch) for ns in spent]


def serve(job: str, rank: int, path: str, make_library: Callable[[], Library]) -> None:
    """Connects to the controller and obeys it until it says stop. Ends at once if the controller is gone."""
    _die_with_parent()
    connection = Client(path, "AF_UNIX")

    def answer(message: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(message).encode())  # JSON: a peer's Python and numpy are other ones

    answer({"job": job, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()})
    try:
        library = make_library()
        answer({"version": library.version, "transport": library.transport})
        worker, prober = Rank(library), Prober(library)
        commands = {"prepare": worker.prepare, "measure": worker.measure}
        commands |= {"constants": prober.constants, "random": prober.random}
        while True:
            command = json.loads(connection.recv_bytes())
            if command["do"] == "stop":
                library.close()
                return
            answer(commands[command["do"]](command))
    except Exception as error:
        with contextlib.suppress(OSError):
            kind = type(error).__name__
            # If the user's request is impossible, the message is enough.
            where = "" if kind == "InvalidUsage" else traceback.format_exc()
            answer({"error": f"{kind}: {error}", "traceback": where})
    # Peers may wait for us in a collective: no orderly end is possible.
    sys.stderr.flush()
    os._exit(1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
