"""What a user writes; `make lint` holds that `mypy --strict` accepts it."""

import numpy
import torch

import ringlet


def main(rank: int) -> None:
    gradient = torch.full((4,), rank + 1.0)
    ringlet.ring_allreduce(gradient)
    bucket = ringlet.empty(1 << 20, dtype=torch.bfloat16).fill_(rank)
    ringlet.butterfly_allreduce(bucket, op="avg")
    total: torch.Tensor = ringlet.all_reduce(gradient)
    work = ringlet.all_reduce(gradient, async_op=True)
    work.wait(2.0)
    ringlet.all_gather([numpy.zeros(4, numpy.float32), torch.zeros(4)], gradient)
    print(f"rank {rank}: {gradient.tolist()}, {bucket[0].item()}", total)


if __name__ == "__main__":
    ringlet.spawn(main, nprocs=2)
