"""BERT as an ordinary LightningModule."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForMaskedLM

from recipes.optimization import adamw, warmup_cosine
from recipes.text.blocks import IGNORE_INDEX

Batch = dict[str, Tensor]


class BertModule(LightningModule):
    """A masked language model that learns to tell hidden tokens from what stands around them.

    Its batches are dicts of ``input_ids`` and ``labels``, int64 of shape ``[batch, length]``: the label of a hidden
    position is the token that belongs there, and -100 everywhere else. Where sequences are filled up to one
    length, an ``attention_mask`` is 0 there and 1 elsewhere. Nothing is downloaded: the weights start at random.

    Args:
        num_layers: Transformer blocks.
        hidden_size: Width of the residual stream; a multiple of ``num_heads``.
        num_heads: Attention heads of a block.
        vocab_size: Tokens in the vocabulary, with the mask token.
        block_size: Longest sequence that the model can read.
        dropout: Probability, for embeddings, attention and residual branches alike.
        learning_rate: Highest learning rate, reached after the warm-up.
        weight_decay: On matrices; biases and normalization scales are not decayed.
        warmup_steps: Optimizer steps in which the learning rate rises from near 0.
        final_learning_rate_fraction: Fraction of ``learning_rate`` that the cosine ends at.
        config: Any further fields of ``transformers.BertConfig``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        vocab_size: int,
        block_size: int,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
        final_learning_rate_fraction: float = 0.1,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.final_learning_rate_fraction = final_learning_rate_fraction
        fields: dict[str, Any] = {
            "num_hidden_layers": num_layers,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_attention_heads": num_heads,
            "vocab_size": vocab_size,
            "max_position_embeddings": block_size,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            # Token 0 is a token like others here, and attention_mask says where there is none.
            "pad_token_id": None,
        }
        self.model = BertForMaskedLM(BertConfig(**(fields | (config or {}))))
        self.val_accuracy = _accuracy(vocab_size)
        self.test_accuracy = _accuracy(vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Give the logits of the token at each position, shape ``[batch, length, vocab_size]``."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = _loss(self(batch["input_ids"], batch.get("attention_mask")), batch["labels"])
        self.log("train/loss", loss, prog_bar=True, batch_size=_num_targets(batch))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Give the most likely token at each position, int64 of shape ``[batch, length]``."""
        return self(batch["input_ids"], batch.get("attention_mask")).argmax(dim=-1)

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
        logits = self(batch["input_ids"], batch.get("attention_mask"))
        loss = _loss(logits, batch["labels"])
        accuracy(logits.flatten(0, 1), batch["labels"].flatten())
        # Weighting by targets makes the epoch's loss the mean over all of them.
        self.log(f"{name}/loss", loss, prog_bar=True, batch_size=_num_targets(batch), sync_dist=True)
        self.log(f"{name}/accuracy", accuracy, batch_size=_num_targets(batch))
        return loss


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the hidden tokens of the negative log-likelihood, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def _num_targets(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum())


def _accuracy(vocab_size: int) -> MulticlassAccuracy:
    return MulticlassAccuracy(num_classes=vocab_size, average="micro", ignore_index=IGNORE_INDEX, validate_args=False)
