"""Whether gradients keep their bits when buckets change size: the reducer with a one-tree algorithm, and DDP on gloo.

    python -m benchmarks.bucket_bits

Where a sum's order depends on an element's place in its message, so do its last bits, and a run cannot be repeated with
another bucket size (pytorch#30509). Prints a digest of all gradients for each size: one digest in a column, same bits.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.local_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringlet

SIZES_MB = (1, 20, 21, 25, 100)
COLUMNS = ("reducer, two_shot", "reducer, butterfly", "reducer, ring", "DDP on gloo")


def model_of(layers: int, width: int) -> nn.Module:
    torch.manual_seed(1)
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*made)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.grad.numpy().tobytes())
    return sha.hexdigest()[:8]


def gradients(column: str, model: nn.Module, bucket_mb: float, gloo: dist.ProcessGroup) -> str:
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    inputs = torch.randn(4, model[0].in_features)
    called = model
    if column.startswith("DDP"):
        called = DistributedDataParallel(model, process_group=gloo, bucket_cap_mb=bucket_mb)
    else:
        ringlet.GradientReducer(model, bucket_mb=bucket_mb, algorithm=column.split(", ")[1])
    for _ in range(2):  # the second one on the buckets in their final order
        model.zero_grad()
        called(inputs).square().mean().backward()
    return digest(model)


def measure(rank: int, world: int, options: argparse.Namespace) -> dict[str, dict[float, str]]:
    gloo = dist.new_group(backend="gloo")
    model = model_of(options.layers, options.width)
    return {
        column: {size: gradients(column, copy.deepcopy(model), size, gloo) for size in options.sizes}
        for column in COLUMNS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=511, help="of each layer; 511 gives 1 MiB of gradients")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES_MB, metavar="MIB")
    parser.add_argument("--json", type=Path, help="write the digests here too")
    options = parser.parse_args()
    found = on_ranks(measure, options.ranks, options)
    print(f"gradients of {options.ranks} ranks, digests\n")
    print(f"{'bucket MiB':<12}" + "".join(f"{column:>20}" for column in COLUMNS))
    for size in found[COLUMNS[0]]:
        print(f"{size:<12}" + "".join(f"{found[column][size]:>20}" for column in COLUMNS))
    kept = {column: len(set(digests.values())) == 1 for column, digests in found.items()}
    print(f"{'same bits':<12}" + "".join(f"{'yes' if kept[column] else 'no':>20}" for column in COLUMNS))
    if options.json:
        options.json.write_text(json.dumps({"digests": found, "same_bits": kept}, indent=2) + "\n")


if __name__ == "__main__":
    main()
