"""Models, data and averages for tests of the gradient reducer, and comparisons with them."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SMALL = {"bucket_mb": 0.0005, "first_bucket_mb": 0.0002}  # 524 and 209 bytes: several buckets for a few layers


def mlp(dtype=torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def data(rank: int, step: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(data(rank, step, dtype)).square().mean()


def expected_average(model: nn.Module, world: int, steps: tuple[int, ...] = (0,), loss=loss_of) -> list[torch.Tensor]:
    """The average over ranks of the gradients summed over `steps`, computed alone."""
    replica = copy.deepcopy(model)
    for parameter in replica.parameters():
        parameter.grad = None
    for rank in range(world):
        for step in steps:
            loss(replica, rank, step).backward()
    return [p.grad / world for p in replica.parameters()]


def assert_gradients(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=lambda text, name=name: f"{name}: {text}")


def assert_step(model: nn.Module, rank: int, world: int, step: int = 0, loss=loss_of) -> None:
    """A backward gives new gradients, the average over all ranks."""
    model.zero_grad()
    loss(model, rank, step).backward()
    assert_gradients(model, expected_average(model, world, (step,), loss))


def same(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def train(model: nn.Module, rank: int, steps: int, set_to_none: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, rank, step).backward()
        optimizer.step()


def sends_late(reducer):
    """Whether its buckets are sent at the end of a backward, because every processor is busy with it."""
    device = torch.device("cpu")
    return reducer._channel.in_place(device) and not reducer._channel.overlaps(device)


class Branches(nn.Module):
    """Two layers, each of which a call may leave out or take first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in names]).square().mean()


class Checkpointed(nn.Module):
    """Layers called in the order of `path`; those after the first in backwards inside the backward."""

    def __init__(self, path: list[int], layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[self.path[0]](x)
        for index in self.path[1:]:
            x = checkpoint(self.layers[index], x, use_reentrant=True)
        return x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")
