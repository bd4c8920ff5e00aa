"""Measures what each ZeRO stage holds and sends per rank, beside what the paper predicts.

    python -m benchmarks.zero_memory [--worlds 2,4,8] [--width 256] [--layers 6] [--json FILE] [--report FILE.md]

A transformer is trained for two steps in bfloat16 with Adam. "counted": the bytes of all tensor storages that the
process holds afterwards and did not before, less the buffers that units are gathered and reduced in, which are a column
of their own. It is counted by the garbage collector, not by ringlet. Figures are the maximum over ranks.
Formulas: Rajbhandari et al., SC 2020 (arXiv 1910.02054), for P parameters on N ranks.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import page
from benchmarks.local_ranks import on_ranks
from examples.char_transformer import CharTransformer, Size, Text, loss_of

import ringlet

STAGES = (1, 2, 3)
FORMULAS = {
    1: ("4P + 12P/N", lambda n: 4 + 12 / n),
    2: ("2P + 14P/N", lambda n: 2 + 14 / n),
    3: ("16P/N", lambda n: 16 / n),
}
STEPS = 2


def storages() -> dict[int, int]:
    """Bytes of every strided tensor's storage, by address."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def measure(rank: int, world: int, stage: int, size: Size) -> dict[str, Any]:
    text = Text()
    before = storages()
    torch.manual_seed(1)
    model = CharTransformer(text.vocabulary, size)
    count = sum(p.numel() for p in model.parameters())
    zero = ringlet.Zero(model, torch.optim.Adam, stage, dtype=torch.bfloat16, lr=1e-3)
    for step in range(STEPS):
        loss_of(model, *text.batch(size, step, rank)).backward()
        zero.step()
    stats = zero.stats()
    buffers = stats["buffers"]["gather_peak_bytes"] + stats["buffers"]["gradient_peak_bytes"]
    after = storages()
    counted = sum(nbytes for address, nbytes in after.items() if address not in before) - buffers
    row = {
        "world": world,
        "stage": stage,
        "parameters": count,
        "predicted_bytes": round(FORMULAS[stage][1](world) * count),
        "told_bytes": stats["memory"]["total"],
        "counted_bytes": counted,
        **{f"{kind}_bytes": stats["memory"][kind] for kind in ("parameters", "gradients", "master", "optimizer")},
        **stats["buffers"],
        "largest_unit_bytes": 2 * max(elements for elements, _ in stats["units"]),
        "sent_bytes_per_step": stats["communication"]["sent_bytes"] // STEPS,
        "all_reduce_bytes": 2 * 2 * count * (world - 1) // world,
    }
    zero.remove()
    return row


def measure_stages(rank: int, world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    size = Size(width=options.width, layers=options.layers, batch=2)
    rows = [measure(rank, world, stage, size) for stage in STAGES]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rows)
    return [{key: max(found[key] for found in ranks) for key in ranks[0]} for ranks in zip(*everyone, strict=True)]


HELD = ("parameters", "gradients", "master", "optimizer")
HEAD = (
    *("ranks", "stage", "formula", "predicted", "counted", "off by", *HELD),
    *("gather buffers", "gradient buffers", "largest unit", "sent / step", "/ all-reduce"),
)


def cells(row: dict[str, Any]) -> list[object]:
    """As text; MB are 10^6 bytes."""
    off = row["counted_bytes"] / row["predicted_bytes"] - 1
    return [
        row["world"], row["stage"], FORMULAS[row["stage"]][0],
        megabytes(row["predicted_bytes"]), megabytes(row["counted_bytes"]), f"{100 * off:+.2f} %",
        *(megabytes(row[f"{key}_bytes"]) for key in (*HELD, "gather_peak", "gradient_peak", "largest_unit")),
        megabytes(row["sent_bytes_per_step"]), f"{row['sent_bytes_per_step'] / row['all_reduce_bytes']:.3f}x",
    ]  # fmt: skip


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--backend", default="ringlet")
    options = page.parse(parser)
    rows = []
    for world in map(int, options.worlds.split(",")):
        rows += on_ranks(measure_stages, world, options, backend=options.backend)
    table = page.markdown_table(HEAD, map(cells, rows), left=0)
    print("\n".join(table))
    model = (
        f"transformer of width {options.width} and {options.layers} layers, {rows[0]['parameters']:,} parameters, "
        f"bfloat16, Adam, backend {options.backend}"
    )
    told = [
        "Per rank, in MB of 10^6 bytes.",
        "Bytes sent are counted by ringlet.Zero: those of an algorithm that sends no more than it must.",
    ]
    lines = [*told, "", *table]
    page.write(options, "zero-memory", "ZeRO: memory of model states and bytes sent", lines, rows, model=model)


if __name__ == "__main__":
    main()
