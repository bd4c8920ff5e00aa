"""A small character-level transformer, and the text it learns: the language reference that ships with Python."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Of the model and of one rank's batch; `width` is divisible by `heads`."""

    width: int = 192
    layers: int = 4
    heads: int = 4
    context: int = 32
    batch: int = 8


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class CharTransformer(nn.Module):
    """Maps characters, int64 (batch, context), to the logits of the next ones, float32 (batch, context, vocabulary)."""

    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.characters(characters) + self.positions[: characters.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


class Text:
    """About 460 000 characters as int64 indices into the `vocabulary` characters that occur in them."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        index = {character: place for place, character in enumerate(characters)}
        self.vocabulary = len(characters)
        self.indices = torch.tensor([index[character] for character in text])

    def batch(self, size: Size, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 (batch, context) each; the same for the same step and rank, on every machine."""
        seed = int.from_bytes(hashlib.sha256(f"{step} {rank}".encode()).digest()[:4], "little")
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.indices) - size.context - 1, (size.batch,), generator=generator)
        windows = self.indices[starts[:, None] + torch.arange(size.context + 1)]
        return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per character, a scalar."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
