"""GPT-2 as an ordinary LightningModule."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.optimization import adamw, warmup_cosine
from recipes.text.blocks import IGNORE_INDEX

Batch = dict[str, Tensor]


class GPT2Module(LightningModule):
    """A causal language model that learns to predict the next token.

    Its batches are dicts of ``input_ids`` and ``labels``, int64 of shape ``[batch, length]``: the label of a position
    is the token after it, or -100 where there is none. Nothing is downloaded: the weights start at random.

    Args:
        num_layers: Transformer blocks.
        hidden_size: Width of the residual stream; a multiple of ``num_heads``.
        num_heads: Attention heads of a block.
        vocab_size: Tokens in the vocabulary.
        block_size: Longest sequence that the model can read.
        dropout: Probability, for embeddings, attention and residual branches alike.
        learning_rate: Highest learning rate, reached after the warm-up.
        weight_decay: On matrices; biases and normalization scales are not decayed.
        warmup_steps: Optimizer steps in which the learning rate rises from near 0.
        final_learning_rate_fraction: Fraction of ``learning_rate`` that the cosine ends at.
        config: Any further fields of ``transformers.GPT2Config``.
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
            "n_layer": num_layers,
            "n_embd": hidden_size,
            "n_head": num_heads,
            "vocab_size": vocab_size,
            "n_positions": block_size,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
            "resid_pdrop": dropout,
            "use_cache": False,
            # GPT-2's own end-of-text token is outside a smaller vocabulary.
            "bos_token_id": None,
            "eos_token_id": None,
        }
        self.model = GPT2LMHeadModel(GPT2Config(**(fields | (config or {}))))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Give the logits of the next token, shape ``[batch, length, vocab_size]``."""
        logits: Tensor = self.model(input_ids=input_ids).logits
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Give the mean over the batch's tokens of the negative log-likelihood, in nats."""
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "val/loss")

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "test/loss")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Give the negative log-likelihood of each sequence in nats, shape ``[batch]``."""
        logits = self(batch["input_ids"])
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORE_INDEX, reduction="none")
        return losses.sum(dim=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = adamw(self, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        scheduler = warmup_cosine(
            optimizer,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            final_fraction=self.final_learning_rate_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _evaluate(self, batch: Batch, name: str) -> Tensor:
        loss = self.loss(batch)
        # Weighting by tokens makes the epoch's value the mean over all tokens, however long the last block is.
        num_tokens = int((batch["labels"] != IGNORE_INDEX).sum())
        self.log(name, loss, prog_bar=True, batch_size=num_tokens, sync_dist=True)
        return loss
