"""Averages over the GPUs of one host, for which `torchrun --nproc-per-node 8 examples/gpu.py` starts a rank each."""

import os

import torch
import torch.distributed as dist

import ringlet

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("ringlet")  # of CPU and CUDA tensors; beside torch's own NCCL "cpu:ringlet,cuda:nccl"

gradient = torch.full((1 << 20,), dist.get_rank() + 1.0, device="cuda")
work = dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True)
work.wait()  # the stream waits, the host goes on

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 16, device="cuda"))
model(torch.ones(8, 256, device="cuda")).square().mean().backward()

if dist.get_rank() == 0:
    print(
        f"ringlet {ringlet.__version__}: average {gradient[0].item()}, gradient {model.module.bias.grad[0].item():.4f}"
    )
dist.destroy_process_group()
