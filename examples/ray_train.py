"""Ray Train on backend ringlet: two workers of this machine train one model.

    pip install 'ray[train]'; python examples/ray_train.py

Ray's workers call torch.distributed.init_process_group before they see the training function, so the backend must be
registered when a worker starts. The job's setup hook does that (RunConfig's worker_runtime_env does not run hooks).
"""

import argparse

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict) -> None:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))  # DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), settings["rate"])
    rank = ray.train.get_context().get_world_rank()
    for _ in range(settings["steps"]):
        model(torch.full((4, 8), rank + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weights)
    same = all(torch.equal(weights, other) for other in everyones)
    if rank == 0:
        print(f"backend {dist.get_backend()}, {len(everyones)} workers, same weights: {same}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", default=None, help="where Ray keeps results (default ~/ray_results)")
    args = parser.parse_args()
    ray.init(num_cpus=args.workers, runtime_env={"worker_process_setup_hook": "ringlet.backend.register"})
    TorchTrainer(
        train,
        train_loop_config={"rate": 1e-3, "steps": 5},
        torch_config=TorchConfig(backend="ringlet"),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(storage_path=args.storage),
    ).fit()


if __name__ == "__main__":
    main()
