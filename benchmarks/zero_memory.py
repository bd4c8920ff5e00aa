#!/usr/bin/env python3
"""Measures what each ZeRO stage holds and sends per rank, beside what the paper predicts.

    benchmarks/zero_memory.py [--worlds 2,4,8] [--width 256] [--layers 6] [--json FILE] [--report FILE.md]

A transformer is trained for two steps in bfloat16 with Adam. "counted": the bytes of all tensor storages that the
process holds afterwards and did not before, less the buffers that units are gathered and reduced in, which are a column
of their own. It is counted by the garbage collector, not by ringlet. Figures are the maximum over ranks.
Formulas: Rajbhandari et al., SC 2020 (arXiv 1910.02054), for P parameters on N ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringlet
from ringlet.bench.results import circumstances
from ringlet.bench.run import Outcome
from ringlet.cli import outputs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page import facts

from char_transformer import CharTransformer, Size, Text, loss_of

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


def rank_main(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=world)
    size = Size(width=options.width, layers=options.layers, batch=2)
    rows = [measure(rank, world, stage, size) for stage in STAGES]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rows)
    if rank == 0:
        largest = [{key: max(r[i][key] for r in everyone) for key in row} for i, row in enumerate(rows)]
        Path(folder, "rows.json").write_text(json.dumps(largest))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A header and a line for each row, as text; MB are 10^6 bytes."""
    held = ["parameters", "gradients", "master", "optimizer"]
    buffers = ["gather buffers", "gradient buffers", "largest unit"]
    first = ["ranks", "stage", "formula", "predicted", "counted", "off by"]
    lines = [[*first, *held, *buffers, "sent / step", "/ all-reduce"]]
    for row in rows:
        off = row["counted_bytes"] / row["predicted_bytes"] - 1
        keys = ("parameters", "gradients", "master", "optimizer", "gather_peak", "gradient_peak", "largest_unit")
        lines.append(
            [
                str(row["world"]), str(row["stage"]), FORMULAS[row["stage"]][0],
                megabytes(row["predicted_bytes"]), megabytes(row["counted_bytes"]), f"{100 * off:+.2f} %",
                *(megabytes(row[f"{key}_bytes"]) for key in keys),
                megabytes(row["sent_bytes_per_step"]), f"{row['sent_bytes_per_step'] / row['all_reduce_bytes']:.3f}x",
            ]
        )  # fmt: skip
    return lines


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}"


def report(rows: list[dict[str, Any]], options: argparse.Namespace, load: float) -> str:
    outcome = Outcome(versions={"ringlet": f"ringlet {ringlet.__version__}, torch {torch.__version__}"})
    meta = circumstances(load, outcome)
    model = (
        f"transformer of width {options.width} and {options.layers} layers, {rows[0]['parameters']:,} parameters, "
        f"bfloat16, Adam, backend {options.backend}"
    )
    head, *lines = table(rows)
    text = [f"# ZeRO: memory of model states and bytes sent, {meta['date'][:10]}", ""]
    text += [
        "Written by `benchmarks/zero_memory.py --report`, which says how it counts. Per rank, in MB of 10^6 bytes."
    ]
    text += ["Bytes sent are counted by ringlet.Zero: those of an algorithm that sends no more than it must.", ""]
    text += [*facts(meta, model=model), ""]
    text += ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    text += ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--backend", default="ringlet")
    parser.add_argument("--json", type=Path, help="a row a line")
    parser.add_argument("--report", type=Path, help="a page in Markdown")
    options = parser.parse_args()
    outputs.check({"--json": options.json, "--report": options.report})
    load, rows = os.getloadavg()[0], []
    for world in map(int, options.worlds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rank_main, (world, options, folder), nprocs=world)
            rows += json.loads(Path(folder, "rows.json").read_text())
    lines = table(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.report:
        options.report.write_text(report(rows, options, load))


if __name__ == "__main__":
    main()
