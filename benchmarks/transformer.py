"""A small causal transformer in plain torch, for the end-to-end measurement: a policy or a value model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Of a transformer; `outputs` logits or values per token."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int


class Block(nn.Module):
    """Attention and feed-forward, each with its norm before and a residual around."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.to_attention, self.from_attention = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.feed_forward = nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        batch, steps, width = x.shape
        parts = self.to_attention(self.norms[0](x)).view(batch, steps, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_attention(attended.transpose(1, 2).reshape(batch, steps, width))
        changed: Tensor = x + self.feed_forward(self.norms[1](x))
        return changed


class Transformer(nn.Module):
    """Token ids [B, T] to [B, T, outputs]."""

    def __init__(self, size: Size, outputs: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """A prediction after every token."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = self.head(self.norm(x))
        return predicted
