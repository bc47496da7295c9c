"""Small modules whose layers are known."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.capture.interception import current

WIDTH = 16
SAMPLES = 8
LOGGED: list[Tensor] = []
"""What `Restless` has logged; not in the module, where it would be put back like all else."""


class Stack(nn.Module):
    """Blocks one after another, between two linear layers."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).pow(2).mean()


class Scale(nn.Module):
    """Multiplies by a parameter: autograd keeps the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class ScaledRelu(Scale):
    """A product, of which the input is kept, and ReLU, of which the output is."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(hidden * self.weight)


class Crossings(nn.Module):
    """Whole numbers and a mask made by a layer cross to later ones, as an index and as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first(batch)
        best = hidden.argmax(-1)
        is_large = hidden > 0
        hidden = self.middle(hidden)
        hidden = hidden.masked_fill(is_large, 0.0) + self.table(best)
        return self.last(hidden).pow(2).mean()


class Restless(nn.Module):
    """A step that changes all that a step can: buffers, flags, lists, random state, a tensor, the batch; it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.total = torch.zeros(())
        self.sums: list[Tensor] = [torch.zeros(WIDTH)]
        self.seen: list[Any] = []
        self.count = 0

    def log(self, value: Tensor) -> None:
        mode = current()
        if mode is None:
            LOGGED.append(value)
        else:
            mode.counted_call(lambda: LOGGED.append(value), (value,))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        self.total += 1
        self.sums[0].add_(batch.sum(0))
        self.seen.append(random.random())
        hidden = self.norm(self.first(batch))
        batch.zero_()
        self.log(hidden.mean())
        hidden = F.dropout(hidden, 0.5)
        loss = self.last(hidden).pow(2).mean()
        self.log(loss)
        return loss


def features() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
