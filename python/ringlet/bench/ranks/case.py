"""One measurement, and what its buffers look like on each rank."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
NUMPY_DTYPES = ITEM_BYTES.keys() - {"bfloat16", "float8_e4m3fn", "float8_e5m2"}

# Collectives whose `count` is the block of one rank and whose `bytes` are those of the buffer of `world` blocks.
SPLIT = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
IN_PLACE = ("all_reduce", "broadcast", "reduce")
COLLECTIVES = IN_PLACE + SPLIT
# torch.distributed's calls that move the same blocks as tensors of a list.
LISTS = {"all_gather_list": "all_gather", "reduce_scatter_list": "reduce_scatter", "all_to_all_list": "all_to_all"}
# send_recv: each pair of ranks sends a buffer there and another back; barrier moves nothing: bytes and count are 0.
CALLS = (*COLLECTIVES, *LISTS, "send_recv", "barrier")
MEMORIES = ("registered", "ordinary", "allocator")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ROOT = 0
# A buffer from this size on is given back after its measurement, so that the libraries do not all hold one.
KEEP_BYTES = 32 << 20


@dataclass(frozen=True)
class Case:
    """A call to measure. `bytes` is the largest buffer that a rank passes, as nccl-tests counts it; `count` its own."""

    collective: str
    algorithm: str
    memory: str
    via: str
    world: int
    bytes: int
    count: int
    dtype: str
    op: str

    @property
    def moves(self) -> str:
        """The collective whose blocks this call moves."""
        return LISTS.get(self.collective, self.collective)


def buffer_elements(case: Case, rank: int) -> tuple[int, int]:
    """Elements of the (input, output) of one rank; an output of 0 means in place or, off the root, none."""
    count, whole, is_root = case.count, case.count * case.world, rank == ROOT
    if case.collective in IN_PLACE:
        return count, 0
    return {
        "send_recv": (count, count),
        "barrier": (0, 0),
        "reduce_scatter": (whole, count),
        "all_gather": (count, whole),
        "gather": (count, whole if is_root else 0),
        "scatter": (whole if is_root else 0, count),
        "all_to_all": (whole, whole),
    }[case.moves]
