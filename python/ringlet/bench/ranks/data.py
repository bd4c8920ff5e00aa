"""The data in the buffers: small integers, exact in every dtype and in every order of summation.

A rank's buffer repeats one table of `PERIOD` values. The period is a prime, so that a block put in the wrong place
shows: blocks start at multiples of other numbers. The expected result repeats a table too, so that a check of
256 MiB needs no second 256 MiB.
"""

from __future__ import annotations

import functools

import numpy as np

from .case import ITEM_BYTES, ROOT, Case

PERIOD = 4099
_COMBINE = {
    "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
OPS = tuple(_COMBINE)

# (table, index into the table of the first element, elements)
Segment = tuple[np.ndarray, int, int]


def input_table(case: Case, rank: int, seed: int) -> np.ndarray:
    """The PERIOD values that `rank` repeats in its input; other values for every seed.

    0 to 3, or 0 to 1 in one-byte types, so that sums over 64 ranks fit; 1 to 2 for products; multiples of the world
    for averages, so that they are whole.
    """
    values = np.random.default_rng((seed, rank)).integers(0, 2 if ITEM_BYTES[case.dtype] == 1 else 4, PERIOD)
    if case.op == "product":
        return values % 2 + 1
    return values * case.world if case.op == "avg" else values


def reduced_table(case: Case, seed: int) -> np.ndarray:
    """The PERIOD values that every element of a reduction repeats."""
    total = functools.reduce(_COMBINE[case.op], (input_table(case, rank, seed) for rank in range(case.world)))
    return total // case.world if case.op == "avg" else total


def expected(case: Case, rank: int, seed: int) -> list[Segment]:
    """The data that `rank` must hold after the call, segment after segment; empty if it receives nothing."""
    count, here = case.count, rank * case.count
    if case.collective == "send_recv":
        return [(input_table(case, rank ^ 1, seed), 0, count)]
    if case.moves == "all_reduce" or (case.moves == "reduce" and rank == ROOT):
        return [(reduced_table(case, seed), 0, count)]
    if case.moves == "reduce_scatter":
        return [(reduced_table(case, seed), here, count)]
    if case.moves in ("broadcast", "scatter"):
        return [(input_table(case, ROOT, seed), here if case.moves == "scatter" else 0, count)]
    if case.moves == "all_gather" or (case.moves == "gather" and rank == ROOT):
        return [(input_table(case, source, seed), 0, count) for source in range(case.world)]
    if case.moves == "all_to_all":
        return [(input_table(case, source, seed), here, count) for source in range(case.world)]
    return []


def fill(target: np.ndarray, table: np.ndarray) -> None:
    """Repeat the table over a one-dimensional array, from its first element."""
    whole = len(target) // PERIOD * PERIOD
    target[:whole].reshape(-1, PERIOD)[:] = table
    target[whole:] = table[: len(target) - whole]


def count_wrong(result: np.ndarray, segments: list[Segment], relative_error: float = 0.0) -> int:
    """Elements of `result` that differ from the segments, read one after another; a NaN differs."""
    wrong, start = 0, 0
    for table, first, elements in segments:
        part = result[start : start + elements]
        start += elements
        wrong += elements - len(part)
        with np.errstate(over="ignore"):
            values = np.roll(table, -first).astype(result.dtype)
        whole = len(part) // PERIOD * PERIOD
        wrong += _differing(part[:whole].reshape(-1, PERIOD), values, relative_error)
        wrong += _differing(part[whole:], values[: len(part) - whole], relative_error)
    return wrong


def _differing(got: np.ndarray, want: np.ndarray, relative_error: float) -> int:
    if relative_error == 0.0:
        return int(np.count_nonzero(got != want))
    return int(np.count_nonzero(~(np.abs(got - want) <= relative_error * np.abs(want))))
