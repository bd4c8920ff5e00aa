"""What a user writes; `make lint` holds that `mypy --strict` accepts it, and infers these types."""

from datetime import timedelta

import numpy
import torch

import ringlet
from ringlet.schedule import Algorithm, Step, load, recv, reduce, schedule, send


@ringlet.algorithm("all_reduce", name="typed")
def mine(rank: int, world: int) -> list[list[Step]]:
    peer = 1 - rank
    return [[send(peer, 0, world), reduce(peer, 0, world)]]


def files(algorithm: Algorithm = mine) -> tuple[str, str, list[Algorithm]]:
    made = schedule(algorithm, world=2)
    assert made.prove().rounds == 1 and recv(0, 1).count == 1
    return made.json(), made.xml(), load("mine.py")


def main(rank: int) -> None:
    gradient = torch.full((4,), rank + 1.0)
    ringlet.ring_allreduce(gradient)
    bucket = ringlet.empty(1 << 20, dtype=torch.bfloat16).fill_(rank)
    ringlet.butterfly_allreduce(bucket, op="avg", timeout=timedelta(seconds=5))
    total: torch.Tensor = ringlet.all_reduce(gradient)
    work: ringlet.Work = ringlet.all_reduce(gradient, async_op=True)
    work.wait(2.0)
    array = numpy.zeros(4, numpy.float32)
    shared: torch.Tensor = ringlet.all_reduce(array, algorithm="ring", scale=0.5, op="premul_sum")
    ringlet.all_gather([array, torch.zeros(4)], gradient)
    ringlet.ring_allreduce(gradient, algorithm="ring")  # type: ignore[call-overload]  # it names its algorithm itself
    ringlet.barrier(async_op=True).wait()
    ringlet.barrier(group=ringlet.current())
    print(f"rank {rank}: {gradient.tolist()}, {bucket[0].item()}", total, shared)


def either(tensor: torch.Tensor, later: bool) -> torch.Tensor | ringlet.Work:
    return ringlet.broadcast(tensor, async_op=later)


if __name__ == "__main__":
    ringlet.spawn(main, nprocs=2)
