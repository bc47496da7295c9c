"""ResNet as an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import ResNetConfig, ResNetForImageClassification

from recipes.optimization import adamw, warmup_cosine

Batch = dict[str, Tensor]


class ResNetModule(LightningModule):
    """A residual convolutional network that learns to tell what is on an image.

    Its batches are dicts of ``pixel_values``, float32 of shape ``[batch, num_channels, height, width]``, and
    ``labels``, int64 of shape ``[batch]``. Nothing is downloaded: the weights start at random.

    Batch normalization takes its statistics over one micro-batch of one replica: batch_size / num_microbatches images
    should be 8 or more.

    Args:
        num_classes: What an image can be.
        num_channels: 1 for grey images, 3 for colour.
        embedding_size: Channels after the first convolution, which halves the image twice with the pooling after it.
        hidden_sizes: Channels in each group of blocks; every group but the first halves the image.
        depths: Blocks in each group.
        layer_type: ``"basic"`` blocks of two convolutions, or ``"bottleneck"`` blocks of three.
        learning_rate: Highest learning rate, reached after the warm-up.
        weight_decay: On convolutions and matrices; biases and normalization scales are not decayed.
        warmup_steps: Optimizer steps in which the learning rate rises from near 0.
        final_learning_rate_fraction: Fraction of ``learning_rate`` that the cosine ends at.
        config: Any further fields of ``transformers.ResNetConfig``.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        num_channels: int,
        embedding_size: int,
        hidden_sizes: Sequence[int],
        depths: Sequence[int],
        layer_type: str = "basic",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 50,
        final_learning_rate_fraction: float = 0.01,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.final_learning_rate_fraction = final_learning_rate_fraction
        fields: dict[str, Any] = {
            "num_labels": num_classes,
            "num_channels": num_channels,
            "embedding_size": embedding_size,
            "hidden_sizes": list(hidden_sizes),
            "depths": list(depths),
            "layer_type": layer_type,
        }
        self.model = ResNetForImageClassification(ResNetConfig(**(fields | (config or {}))))
        self.val_accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro")

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Give the logits of the classes, shape ``[batch, num_classes]``."""
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["pixel_values"]), batch["labels"])
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Give the probabilities of the classes, shape ``[batch, num_classes]``."""
        return self(batch["pixel_values"]).softmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = adamw(self, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        scheduler = warmup_cosine(
            optimizer,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            final_fraction=self.final_learning_rate_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _evaluate(self, batch: Batch, name: str, accuracy: MulticlassAccuracy) -> Tensor:
        logits = self(batch["pixel_values"])
        loss = F.cross_entropy(logits, batch["labels"])
        accuracy(logits, batch["labels"])
        self.log(f"{name}/loss", loss, prog_bar=True, batch_size=len(batch["labels"]), sync_dist=True)
        self.log(f"{name}/accuracy", accuracy, prog_bar=True, batch_size=len(batch["labels"]))
        return loss
