"""Which steps count as several passes through one model, and what is told where a step cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopipe.capture.refusals import refuse_repeated_pass, refuse_too_few_layers
from lightning_autopipe.core.errors import CaptureError, ConfigurationError
from tests.capture.models import WIDTH, features, token_ids
from tests.capture.support import traced


class Model(nn.Module):
    """A network beside a small head and a large embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        self.embedding = nn.Embedding(1000, WIDTH)


class InARow(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for _ in range(3):
            h = self.net(h)
        return self.head(h).sum()


class SharedEmbedding(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(self.embedding(batch)) + self.embedding(batch + 1)).sum()


class SharedHead(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(batch)).sum() + self.head(batch).sum()


class Inside(Model):
    """What a model does inside is its own: an encoder that is used for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers(self.net)
        del self.embedding

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.towers(batch)).sum()


class Towers(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self.net(-x)


@pytest.mark.parametrize("model_class", [InARow, SharedEmbedding, SharedHead, Inside])
def test_one_pass(model_class: type[Model]) -> None:
    batch = token_ids() if model_class is SharedEmbedding else features()
    refuse_repeated_pass(traced(model_class().double(), (batch, 0)).trace, "training_step")


def test_two_passes() -> None:
    class TwoPasses(Model):
        def __init__(self) -> None:
            super().__init__()
            del self.embedding

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.head(self.net(batch) - self.net(-batch)).sum()

    with pytest.raises(CaptureError, match=r"passes 2 times through net \(again at .*test_refusals\.py:\d+: .*98%"):
        refuse_repeated_pass(traced(TwoPasses().double(), (features(), 0)).trace, "training_step")


def test_what_cannot_be_cut_is_told() -> None:
    class Averaging(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h = batch * self.head.weight
            self.average.mul_(0.5).add_(h.detach().mean(0))
            return self.head(self.net(h) + self.average).sum()

    step = traced(Averaging().double(), (features(), 0))
    with pytest.raises(ConfigurationError, match=r"9 is more than the \d layers.*average, which the step writes"):
        refuse_too_few_layers(step.trace, step.table, 9, "training_step")
