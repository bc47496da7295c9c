"""Ordinary modules with a training step, for tests of the whole pipeline in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
VOCABULARY = 13
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class CausalLanguageModel(nn.Module):
    """GPT-2; the loss is computed in the step, in float64, over the tokens that are not ignored."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_layer=2, n_embd=8, n_head=2, vocab_size=VOCABULARY, n_positions=16,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        self.network = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    validation_step = training_step

    @staticmethod
    def batch(num_samples: int, length: int = 6) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator(0))
        labels = ids.clone()
        for row in range(num_samples):  # each row has another number of valid tokens, the last one none
            labels[row, 1 + (num_samples - 1 - row) % length :] = -100
        return {"input_ids": ids, "labels": labels}


class MaskedLanguageModel(nn.Module):
    """BERT with real padding."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL
        )
        self.network = transformers.BertForMaskedLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"])

    @staticmethod
    def batch(num_samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (num_samples, 6), generator=generator(1))
        lengths = torch.arange(num_samples) % 5 + 2
        mask = (torch.arange(6) < lengths[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class ImageClassifier(nn.Module):
    """ResNet."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], num_labels=3)
        self.network = transformers.ResNetForImageClassification(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(pixel_values=images).logits, labels)

    @staticmethod
    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(num_samples, 3, 16, 16, generator=generator(2), dtype=torch.float64)
        return images, torch.arange(num_samples) % 3


class Unet(nn.Module):
    """Skips over many layers, in-place activations, batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._conv(3, 4), self._conv(4, 6, 2), self._conv(6, 6, 2)])
        self.up = nn.ModuleList([self._conv(12, 6), self._conv(10, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x = batch["images"]
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block, skip in zip(self.up, (skips[1], skips[0]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return {"loss": F.mse_loss(self.head(x), batch["target"])}

    @staticmethod
    def batch(num_samples: int) -> dict[str, Tensor]:
        images = torch.randn(num_samples, 3, 8, 8, generator=generator(3), dtype=torch.float64)
        return {"images": images, "target": images[:, :1].abs()}


class GatedBlock(nn.Module):
    def __init__(self, losses: list[Tensor], width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Linear(width, 2)
        self.losses = losses

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(-1)
        self.losses.append(gate.pow(2).sum(-1).mean())
        return x + self.linear(x).tanh() * gate[:, :1]


class OwnPython(nn.Module):
    """Random masking, a metric and a list of auxiliary losses in the step."""

    WIDTH = 6

    def __init__(self, masking: float = 0.0) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.blocks = nn.ModuleList(GatedBlock(self.losses, self.WIDTH) for _ in range(4))
        self.head = nn.Linear(self.WIDTH, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.masking = masking

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        x = batch["x"]
        if self.masking:
            x = x * (torch.rand(x.shape[0], 1) >= self.masking)
        self.losses.clear()
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits, batch["label"]) + 0.1 * sum(self.losses)
        self.losses.clear()
        accuracy = self.accuracy(logits, batch["label"])
        return {"loss": loss, "accuracy": accuracy, "value": loss.item(), "names": batch["names"]}

    @staticmethod
    def batch(num_samples: int) -> dict[str, Any]:
        x = torch.randn(num_samples, OwnPython.WIDTH, generator=generator(4), dtype=torch.float64)
        return {"x": x, "label": torch.arange(num_samples) % 3, "names": [f"s{n}" for n in range(num_samples)]}


class Chain(nn.Module):
    """Linear layers with a step given as a function of the module, the output and the batch."""

    def __init__(
        self, loss: Callable[[Tensor, Any], Any], width: int = 4, depth: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = batch["x"]
        for layer in self.layers:
            h = self.dropout(layer(h).tanh())
        return self.loss(h, batch)

    validation_step = training_step
    predict_step = training_step
