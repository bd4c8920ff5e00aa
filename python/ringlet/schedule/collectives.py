"""The promise of each collective, stated a second time, so that the prover does not trust the C++ that it checks.

Chunks are indices into a schedule's `parts`. *Divided* collectives (all_reduce, broadcast, reduce) cut the caller's
buffer into any number of parts, and a chunk keeps its index; in the *blocked* others every chunk is a block of the same
size. S, the unit of bytes, is the divided buffer, or all ranks' blocks together.
"""

from __future__ import annotations

DIVIDED = ("all_reduce", "broadcast", "reduce")
BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all", "barrier")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
COLLECTIVES = DIVIDED + BLOCKED

Chunks = tuple[int, int]  # (first, count)


def required_parts(collective: str, world: int) -> int | None:
    """The number of parts that a schedule must have; None if it may choose."""
    if collective in DIVIDED:
        return None
    return {"all_to_all": 2 * world, "barrier": 1}.get(collective, world)


def parts_of_s(collective: str, world: int, parts: int) -> int:
    """The number of chunks in S."""
    return parts if collective in DIVIDED else world


def input_chunks(collective: str, rank: int, world: int, root: int, parts: int) -> Chunks:
    """The chunks that hold the rank's own data when the collective begins."""
    if collective in ("broadcast", "scatter"):
        return (0, parts) if rank == root else (0, 0)
    if collective in ("all_gather", "gather"):
        return (rank, 1)
    return {"all_to_all": (0, world), "barrier": (0, 0)}.get(collective, (0, parts))


def output_chunks(collective: str, rank: int, world: int, root: int, parts: int) -> Chunks:
    """The chunks that hold the rank's result when it is over."""
    if collective in ("reduce", "gather"):
        return (0, parts) if rank == root else (0, 0)
    if collective in ("reduce_scatter", "scatter"):
        return (rank, 1)
    return {"all_to_all": (world, world), "barrier": (0, 0)}.get(collective, (0, parts))


def promised(collective: str, rank: int, chunk: int, world: int, root: int) -> tuple[int, int]:
    """The required content of an output chunk: (its input chunk, the contributing ranks as a bit mask)."""
    if collective in REDUCTIONS:
        return chunk, (1 << world) - 1
    if collective in ("broadcast", "scatter"):
        return chunk, 1 << root
    if collective == "all_to_all":
        return rank, 1 << (chunk - world)
    return chunk, 1 << chunk
