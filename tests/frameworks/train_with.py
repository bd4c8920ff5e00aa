"""What one rank runs for test_frameworks.py: `train_with.py FRAMEWORK BACKEND FOLDER`, in torchrun's environment.

The same model and the same data under each framework; every step's loss goes to FOLDER/losses-RANK.json.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import ringlet

STEPS, BATCH, WIDTH = 8, 8, 16
CLIP = 0.1  # below every norm
BATCHES: list[dict[str, torch.Tensor]] = []  # this rank's, under Zero


class Regression(nn.Module):
    """Gives {"loss", "logits"}, as transformers wants it; buckets of several sizes, and a parameter a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def samples(world: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Of all ranks and steps; every step has the same ones, so that the loss falls."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCH * (world or int(os.environ["WORLD_SIZE"])), WIDTH, generator=generator)
    return [{"inputs": row, "labels": row[:1].sin()} for row in inputs] * STEPS


def own_batches(rank: int, world: int) -> Iterator[dict[str, torch.Tensor]]:
    mine = samples(world)[rank::world]
    for first in range(0, len(mine), BATCH):
        yield torch.utils.data.default_collate(mine[first : first + BATCH])


def accelerate(backend: str) -> list[float]:
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size() > 1
    model = Regression()
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


def lightning(backend: str) -> list[float]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    losses: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = DDPStrategy(process_group_backend=backend)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, gradient_clip_val=1.0, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(samples(), batch_size=BATCH))
    return losses


def transformers(backend: str) -> list[float]:
    from transformers import Trainer, TrainingArguments

    dist.init_process_group(backend)  # ddp_backend= takes the backends alone that Accelerate knows by name
    folder = sys.argv[3]
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=1,
        learning_rate=1e-2, seed=5, **quiet,
    )  # fmt: skip
    trainer = Trainer(Regression(), arguments, train_dataset=samples())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def alone_with_zero(backend: str, stage: int = 2) -> ringlet.Zero:
    """A Zero, for a framework that takes this rank for the only one: it would put the model into DDP."""
    dist.init_process_group(backend)
    rank_own = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    BATCHES.extend(own_batches(int(rank_own["RANK"]), int(rank_own["WORLD_SIZE"])))
    return ringlet.Zero(Regression(), torch.optim.Adam, stage, lr=1e-2)


def mean_of_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def zero_accelerate(backend: str) -> list[float]:
    zero = alone_with_zero(backend)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    model, optimizer = accelerator.prepare(zero.module, zero.optimizer)
    losses = []
    for batch in BATCHES:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_ranks(loss))
    return losses


def zero_lightning(backend: str) -> list[float]:
    zero = alone_with_zero(backend)
    from lightning.pytorch import LightningModule, Trainer

    losses: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = zero.module

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            losses.append(mean_of_ranks(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return zero.optimizer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=CLIP, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return losses


def zero_transformers(backend: str) -> list[float]:
    zero = alone_with_zero(backend)
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class MeanOfRanks(Trainer):
        def compute_loss(self, *arguments: object, **options: object) -> torch.Tensor:
            loss = super().compute_loss(*arguments, **options)
            losses.append(mean_of_ranks(loss))
            return loss

        def get_train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(BATCHES, batch_size=None)

    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    arguments = TrainingArguments(sys.argv[3], use_cpu=True, num_train_epochs=1, max_grad_norm=CLIP, **quiet)
    schedule = torch.optim.lr_scheduler.ConstantLR(zero.optimizer, factor=1.0)
    MeanOfRanks(zero.module, arguments, train_dataset=samples(1), optimizers=(zero.optimizer, schedule)).train()
    return losses


def zero_alone(backend: str) -> list[float]:
    """What the others must give: every rank trains on the batches of all ranks, with torch alone."""
    dist.init_process_group(backend)
    model, world = Regression(), dist.get_world_size()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for parts in zip(*(own_batches(rank, world) for rank in range(world)), strict=True):
        loss = torch.stack([model(**part)["loss"] for part in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def deepspeed(backend: str) -> list[float]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as framework

    framework.init_distributed(dist_backend=backend)
    model = Regression()
    engine, *_ = framework.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), 1e-2),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 500, "allgather_bucket_size": 500},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1.0,
        },
    )
    losses = []
    for batch in own_batches(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


TRAINS = {
    "accelerate": accelerate, "lightning": lightning, "transformers": transformers, "deepspeed": deepspeed,
    "zero_accelerate": zero_accelerate, "zero_lightning": zero_lightning, "zero_transformers": zero_transformers,
    "zero_alone": zero_alone,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    losses = TRAINS[sys.argv[1]](sys.argv[2])
    told = {"losses": losses, "backend": dist.get_backend()}
    pathlib.Path(sys.argv[3], f"losses-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
