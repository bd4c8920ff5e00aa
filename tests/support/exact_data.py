"""Inputs whose reductions are exact in their dtype whatever the order, and what must come out, by plain torch.

Every rank's input repeats a table of PERIOD elements (a prime, so that a chunk in the wrong place shows); the result
repeats the table of results. Values are small enough for float8, whose partial sums up to a world of 8 stay exact.
"""

from __future__ import annotations

import functools

import torch

PERIOD = 1009

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
BITWISE = ("band", "bor", "bxor")


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def supported(dtype: torch.dtype, op: str) -> bool:
    """The table of csrc/base/dtype.h, written down a second time."""
    if op == "avg":
        return dtype != torch.bool
    if op in ("min", "max"):
        return not dtype.is_complex
    if op in BITWISE:
        return is_integer(dtype) or dtype == torch.bool
    if op == "premul_sum":
        return dtype.is_floating_point or dtype.is_complex
    return True


def scale_of(rank: int) -> float:
    """premul_sum's factor: another on every rank, a power of two."""
    return 2.0 ** (rank % 3 - 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _random(low: int, high: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Integers of [low, high]; complex ones have two parts."""
    values = torch.randint(low, high + 1, (PERIOD,), generator=generator)
    if not dtype.is_complex:
        return values.to(_wide(dtype))
    return torch.complex(values.double(), torch.randint(low, high + 1, (PERIOD,), generator=generator).double())


@functools.lru_cache(maxsize=4096)
def table(dtype: torch.dtype, op: str, world: int, rank: int) -> torch.Tensor:
    """PERIOD elements of one rank's input, in the wide type."""
    generator = torch.Generator().manual_seed(1000 * OPS.index(op) + rank)
    if dtype == torch.bool:
        # Rare zeros for products, rare ones for sums: results that are not all alike in a world of 8.
        rare = torch.rand(PERIOD, generator=generator) < 0.15
        return (~rare if op in ("product", "min", "band") else rare).to(torch.int64)
    if op in BITWISE or (is_integer(dtype) and op in ("sum", "product", "min", "max")):
        bits = torch.iinfo(dtype)
        return torch.randint(bits.min, bits.max, (PERIOD,), generator=generator).to(torch.int64)
    if op in ("sum", "min", "max"):
        return _random(-1, 1, dtype, generator)
    if op == "avg" and is_integer(dtype):
        return _random(0 if dtype == torch.uint8 else -15, 15, dtype, generator)
    if op == "avg":
        # One rank holds the world times the average, the others nothing.
        shared = torch.Generator().manual_seed(77)
        average = _random(-1, 1, dtype, shared)
        return torch.where(torch.arange(PERIOD) % world == rank, average * world, torch.zeros_like(average))
    if op == "premul_sum":
        return _random(-1, 1, dtype, generator) / scale_of(rank)
    if dtype.is_complex:
        factors = torch.tensor([1, 1j, -1, -1j, 0.5], dtype=torch.complex128)
    else:
        factors = torch.tensor([0.5, 1, -1, 2], dtype=torch.float64)
    return factors[torch.randint(factors.numel(), (PERIOD,), generator=generator)]


@functools.lru_cache(maxsize=1024)
def reduced_table(dtype: torch.dtype, op: str, world: int) -> torch.Tensor:
    """PERIOD elements of the result, in `dtype`."""
    tables = [table(dtype, op, world, rank) for rank in range(world)]
    if op == "premul_sum":
        tables = [values * scale_of(rank) for rank, values in enumerate(tables)]
    if dtype == torch.bool:
        together = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
        return _fold(together, tables).to(torch.bool)
    if op == "avg":
        total = _fold("sum", tables)
        return (torch.div(total, world, rounding_mode="trunc") if is_integer(dtype) else total / world).to(dtype)
    return _fold("sum" if op == "premul_sum" else op, tables).to(dtype)


def _fold(op: str, tables: list[torch.Tensor]) -> torch.Tensor:
    combine = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }[op]
    return functools.reduce(combine, tables)


def repeat(values: torch.Tensor, count: int) -> torch.Tensor:
    """The table laid end to end, `count` elements."""
    raw = values.view(torch.uint8) if values.element_size() == 1 else values  # float8 has few operations of its own
    return raw.repeat(-(-max(count, 1) // PERIOD))[:count].contiguous().view(values.dtype)


@functools.lru_cache(maxsize=16)
def input_of(dtype: torch.dtype, op: str, world: int, rank: int, count: int) -> torch.Tensor:
    """Not to be written to: one tensor serves many cases."""
    return repeat(table(dtype, op, world, rank).to(dtype), count)


@functools.lru_cache(maxsize=4)
def result_of(dtype: torch.dtype, op: str, world: int, count: int) -> torch.Tensor:
    """Not to be written to."""
    return repeat(reduced_table(dtype, op, world), count)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Where the bits differ first; empty if nowhere. The sign of a complex product's zero depends on the order."""
    if got.dtype != wanted.dtype or got.numel() != wanted.numel():
        return f"{got.numel()} of {got.dtype} for {wanted.numel()} of {wanted.dtype}"
    if torch.equal(_bits(got), _bits(wanted)):
        return ""
    got, wanted = got.reshape(-1), wanted.reshape(-1)
    if got.is_complex():
        got, wanted = torch.view_as_real(got).flatten() + 0, torch.view_as_real(wanted).flatten() + 0  # -0 + 0 is 0
    places = (_bits(got) != _bits(wanted)).nonzero().reshape(-1)
    if places.numel() == 0:
        return ""
    got, wanted, first = got.reshape(-1), wanted.reshape(-1), int(places[0])
    pair = f"{got[first].to(torch.float64):g} for {wanted[first].to(torch.float64):g}"
    return f"{places.unique().numel()} of {got.numel()} differ; at {first} {pair}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    """As integers of the elements' size, which torch compares faster than bytes."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return values.reshape(-1).view(integers.get(values.element_size(), torch.int64))
