"""The half of `ringlet reveal` that runs inside the ranks: adds the numbers that it is told, and tells what comes out.

It knows no trees of its own. `constants` adds values that are constant over runs of elements, and answers with the runs
of the results; `random` adds random numbers, and counts the results that a given tree does not give.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from .case import Case, buffer_elements
from .data import PERIOD, count_wrong

if TYPE_CHECKING:
    from .loop import Library

# What may add numbers of a dtype, the narrowest first.
ACCUMULATORS = {
    "float16": (np.float32, np.float64), "bfloat16": (np.float32, np.float64),
    "float32": (np.float32, np.float64), "float64": (np.float64, np.longdouble),
}  # fmt: skip


class Prober:
    """Answers the two commands for one library. Both take:

    case: as a Case; offset: of the buffers from where the allocator puts them, in elements; in_place: of an all-reduce.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def constants(self, command: dict[str, Any]) -> dict[str, Any]:
        """starts: first elements of the runs; values[call][rank][run]: what a rank adds in a call.

        Answers with the runs of this rank's results, over all calls: starts, and for each the column of its results.
        """
        call = self._bind(command)
        if isinstance(call, dict):
            return call
        found = []
        for values in command["values"]:
            call.fill(command["starts"], [np.full(PERIOD, value) for value in values[self._library.rank]])
            result = call()
            starts = _starts(result)
            found.append((starts, result[starts].astype(np.float64)))
        starts = np.unique(np.concatenate([starts for starts, _ in found]))
        rows = [results[np.searchsorted(own, starts, "right") - 1] for own, results in found]
        columns, column_of = np.unique(np.stack(rows, axis=1), axis=0, return_inverse=True)
        first = (starts + call.first).tolist()
        return {"starts": first, "column_of": column_of.reshape(-1).tolist(), "columns": columns.tolist()}

    def random(self, command: dict[str, Any]) -> dict[str, Any]:
        """seed: of the numbers; calls: with the same numbers; starts and trees of the runs of this rank's results, by
        rank. A tree is a rank, or [whether its sum is rounded, tree, tree]; None: of no run.

        Answers with a digest of the results of each call, and the results that differ from the trees' (None: not
        compared) in the accumulator that has the fewest of them.
        """
        call = self._bind(command)
        if isinstance(call, dict):
            return call
        dtype, rank, world = call.case.dtype, self._library.rank, call.case.world
        tables = [_random_table(dtype, command["seed"], peer) for peer in range(world)]
        digests = []
        for _ in range(command["calls"]):
            call.fill([0], [tables[rank]])
            result = call()
            digests.append(hashlib.sha256(result.tobytes()).hexdigest())
        starts, trees = command["starts"][rank], command["trees"][rank]
        answer: dict[str, Any] = {"digests": digests, "elements": len(result), "wrong": None, "accumulator": None}
        if trees is None or not len(result):
            return answer
        for accumulator in ACCUMULATORS[dtype]:
            sums = [_rounded(_evaluate(tree, tables, accumulator, dtype), dtype) for tree in trees]
            ends = [*starts[1:], call.first + len(result)]
            segments = [(table, start, end - start) for table, start, end in zip(sums, starts, ends, strict=True)]
            wrong = count_wrong(result, segments)
            if answer["wrong"] is None or wrong < answer["wrong"]:
                answer |= {"wrong": wrong, "accumulator": np.dtype(accumulator).name}
        return answer

    def _bind(self, command: dict[str, Any]) -> _Call | dict[str, Any]:
        """The call, or the answer that this library does not have it."""
        case = Case(**command["case"])
        refusal = self._library.refusal(case)
        if not (command["in_place"] or self._library.out_of_place):
            refusal = "this library reduces in place only"
        return {"refused": refusal} if refusal else _Call(self._library, case, command["offset"], command["in_place"])


class _Call:
    """One collective call on buffers of its own. `first`: the element of the message that its result begins with."""

    def __init__(self, library: Library, case: Case, offset: int, in_place: bool) -> None:
        self.case, self._library = case, library
        elements, results = buffer_elements(case, library.rank)
        if not in_place:
            results = case.count
        self._source = library.allocate(elements + offset, case)[offset:]
        self._output = library.allocate(results + offset, case)[offset:] if results else None
        self.first = library.rank * case.count if case.collective == "reduce_scatter" else 0
        self._elements = elements
        self._call = library.bind(case, self._source, self._output)

    def fill(self, starts: list[int], tables: list[np.ndarray]) -> None:
        """Each run of the input repeats its table, as if from element 0 of the message."""
        for start, stop, table in zip(starts, [*starts[1:], self._elements], tables, strict=True):
            self._library.write(self._source[start:stop], np.roll(table, -start))

    def __call__(self) -> np.ndarray:
        self._call()
        if self._library.finish:
            self._library.finish()
        rank, case = self._library.rank, self.case
        if case.collective == "reduce" and rank != 0:
            return np.empty(0, np.float32)
        return self._library.read(self._source if self._output is None else self._output)


def _starts(result: np.ndarray) -> np.ndarray:
    """The first element of every run of equal bits."""
    bits = result.view(f"u{result.itemsize}")
    return np.concatenate([np.arange(min(1, len(bits))), np.flatnonzero(bits[1:] != bits[:-1]) + 1])


def _random_table(dtype: str, seed: int, rank: int) -> np.ndarray:
    """PERIOD numbers of the dtype, whose sums depend on their order."""
    source = np.random.default_rng((seed, rank))
    return _rounded(source.standard_normal(PERIOD) * 2.0 ** source.integers(-4, 5, PERIOD), dtype)


def _evaluate(tree: Any, tables: list[np.ndarray], accumulator: Any, dtype: str) -> np.ndarray:
    if isinstance(tree, int):
        return tables[tree].astype(accumulator)
    rounds, *terms = tree
    total = np.add(*(_evaluate(term, tables, accumulator, dtype) for term in terms))
    return _rounded(total, dtype).astype(accumulator) if rounds else total


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest value of the dtype, the even one if two are; bfloat16 as float32."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000).view(np.float32)
