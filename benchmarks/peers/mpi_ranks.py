"""A rank of an MPI library, through mpi4py on numpy buffers. Runs inside that library's environment (make_peers.sh).

The buffer specifications are built once, outside the timed loop, and all-reduce is in place, as ringlet's is. MPI is
initialised without thread support, which is what makes it fastest.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.threads = False
sys.path.append(os.path.dirname(os.environ["RINGLET_BENCH_RANKS"]))

from mpi4py import MPI  # noqa: E402
from ranks.case import COLLECTIVES, ROOT, Case  # noqa: E402
from ranks.loop import serve  # noqa: E402

from ranks import data  # noqa: E402

DATATYPES = {
    "float64": MPI.DOUBLE, "float32": MPI.FLOAT, "int64": MPI.INT64_T, "int32": MPI.INT32_T, "int16": MPI.INT16_T,
    "int8": MPI.INT8_T, "uint8": MPI.UINT8_T, "complex64": MPI.C_FLOAT_COMPLEX, "complex128": MPI.C_DOUBLE_COMPLEX,
}  # fmt: skip
OPS = {
    "sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX,
    "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR,
}  # fmt: skip


class Mpi:
    """MPI_COMM_WORLD."""

    compares = True
    out_of_place = True
    finish = None

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank
        self.transport = "default"
        lines = MPI.Get_library_version().replace("\0", "").splitlines()
        self.version = " ".join(lines[0].split(",")[0].split())

    def refusal(self, case: Case) -> str | None:
        if case.collective not in COLLECTIVES:
            return f"{case.collective} is compared through torch.distributed only"
        if case.dtype not in DATATYPES:
            return f"MPI has no datatype for {case.dtype}"
        return None if case.op in OPS else f"MPI has no operation for {case.op}"

    def allocate(self, elements: int, case: Case) -> np.ndarray:
        return np.empty(elements, dtype=case.dtype)

    def write(self, buffer: np.ndarray, table: np.ndarray) -> None:
        data.fill(buffer, table)

    def read(self, buffer: np.ndarray) -> np.ndarray:
        return buffer

    def bind(self, case: Case, source: Any, output: Any) -> Callable[[], object]:
        comm, datatype, op = self._comm, DATATYPES[case.dtype], OPS[case.op]
        send = None if source is None else [source, datatype]
        receive = None if output is None else [output, datatype]
        into_root = (MPI.IN_PLACE, send) if self.rank == ROOT else (send, None)
        return {
            "all_reduce": functools.partial(
                comm.Allreduce, *((send, receive) if receive else (MPI.IN_PLACE, send)), op
            ),
            "broadcast": functools.partial(comm.Bcast, send, ROOT),
            "reduce": functools.partial(comm.Reduce, *into_root, op, ROOT),
            "reduce_scatter": functools.partial(comm.Reduce_scatter_block, send, receive, op),
            "all_gather": functools.partial(comm.Allgather, send, receive),
            "gather": functools.partial(comm.Gather, send, receive, ROOT),
            "scatter": functools.partial(comm.Scatter, send, receive, ROOT),
            "all_to_all": functools.partial(comm.Alltoall, send, receive),
        }[case.collective]

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        MPI.Finalize()


if __name__ == "__main__":
    serve(sys.argv[1], MPI.COMM_WORLD.rank, sys.argv[2], Mpi)
