"""Modules without `transformers`."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.architectures import batches
from tests.architectures.architecture import Architecture
from tests.architectures.batches import VOCABULARY, numbers, token_ids
from tests.capture.models import Sequence
from tests.runtime.step_models import Unet

WIDTH = 8


class LstmLanguageModel(LightningModule):
    """Stacked LSTMs between an embedding and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden, _ = self.first(self.embedding(batch["input_ids"]))
        hidden, _ = self.second(hidden)
        logits = self.head(hidden)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class WeightNormedConvolutions(LightningModule):
    """Dilated convolutions whose weights are parametrized by direction and length."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        widths = [2, WIDTH, WIDTH, WIDTH]
        self.blocks = nn.ModuleList(
            normed(nn.Conv1d(inputs, outputs, 3, dilation=2**index, padding=2**index))
            for index, (inputs, outputs) in enumerate(itertools.pairwise(widths))
        )
        self.head = normed(nn.Conv1d(WIDTH, 1, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = batch["signal"]
        for block in self.blocks:
            hidden = block(hidden).relu()
        return F.mse_loss(self.head(hidden), batch["target"])


class UnetModule(Unet, LightningModule):
    """Skips from each level down to the same level up, in-place activations, batch normalization."""


class TorchModule(Sequence, LightningModule):
    """A module of torch's own between an embedding and a head."""


def torch_encoder() -> TorchModule:
    return TorchModule(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3))


PLAIN = {
    "nn.LSTM": Architecture(kind="recurrent", network=LstmLanguageModel, batch=batches.causal),
    "nn.TransformerEncoder": Architecture(
        kind="torch's own encoder", network=torch_encoder, batch=lambda: token_ids(4, below=11)
    ),
    "weight norm": Architecture(
        kind="parametrized convolutions",
        network=WeightNormedConvolutions,
        batch=lambda: {"signal": numbers(2, 2, 16), "target": numbers(2, 1, 16, seed=1)},
    ),
    "U-Net": Architecture(
        kind="convolutional, long skips",
        network=UnetModule,
        batch=lambda: Unet.batch(2),
    ),
}
