"""All-reduces of other projects' shared-memory kernels for CPUs, for `ringlet reveal`, built from their source trees.

    DEEPSPEED_SOURCE=DeepSpeed ringlet reveal benchmarks.peers.shm_kernels:deepspeed -n 4 --timeout 900
    VLLM_SOURCE=vllm ringlet reveal benchmarks.peers.shm_kernels:vllm -n 4 --timeout 900

They need AVX-512. The first call builds, which takes minutes.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

_VLLM_BINDING = """
#include <torch/extension.h>
int64_t init_shm_manager(const std::string&, const int64_t, const int64_t, const int64_t);
std::string join_shm_manager(int64_t, const std::string&);
void shm_allreduce(int64_t, torch::Tensor&);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", &init_shm_manager);
  m.def("join", &join_shm_manager);
  m.def("all_reduce", &shm_allreduce);
}
"""


def deepspeed(x: torch.Tensor) -> None:
    """In place."""
    _deepspeed()
    torch.ops.deepspeed.inference_all_reduce_(x)


def vllm(x: torch.Tensor) -> None:
    """In place."""
    module, handle = _vllm()
    module.all_reduce(handle, x)


@functools.cache
def _deepspeed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_SIZE=str(world), MASTER_ADDR="reveal", MASTER_PORT=str(os.getppid()))
    folder = os.path.join(os.environ["DEEPSPEED_SOURCE"], "csrc/cpu/comm")
    sources = [os.path.join(folder, name) for name in ("shm.cpp", "shm_interface.cpp")]
    _built("deepspeed_shm", sources, []).initialize(world, rank)


@functools.cache
def _vllm() -> tuple[Any, int]:
    folder = os.path.join(os.environ["VLLM_SOURCE"], "csrc")
    binding = os.path.join(cpp_extension.get_default_build_root(), "vllm_shm_binding.cpp")
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(binding), exist_ok=True)
        with open(binding, "w") as file:
            file.write(_VLLM_BINDING)
    dist.barrier()
    module = _built("vllm_shm", [os.path.join(folder, "cpu/shm.cpp"), binding], ["-mavx512bf16", f"-I{folder}"])
    name = f"vllm_{os.getppid()}"
    handle = module.init(name, dist.get_world_size(), dist.get_rank(), 1)
    dist.barrier()
    module.join(handle, name)
    dist.barrier()
    return module, handle


def _built(name: str, sources: list[str], flags: list[str]) -> Any:
    """One rank builds; the others wait for its lock."""
    flags = ["-O2", "-march=native", "-fopenmp", *flags]
    return cpp_extension.load(name, sources, extra_cflags=flags, extra_ldflags=["-lrt", "-fopenmp"])
