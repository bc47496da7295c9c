"""A text as batches of token blocks with hidden tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from recipes.text.data_module import TextDataModule
from recipes.text.masking import MaskedBlocks
from recipes.text.tokenizer import NUM_BYTES


class MaskedTextDataModule(TextDataModule):
    """A `TextDataModule` for masked language models, which learn to tell hidden tokens from what stands around them.

    Batches are dicts of ``input_ids`` and ``labels``, int64 of shape ``[batch_size, block_size]``
    (the last batch may be smaller); see `MaskedBlocks`. The last token of the vocabulary is the mask token. In the
    held-out part the same tokens are hidden in every epoch and run.

    Args:
        mask_fraction: Fraction of the tokens to tell.
        dynamic_masking: Hide other tokens in each epoch of training; False hides the same ones, on any machine.
        settings: Those of `TextDataModule`.
    """

    def __init__(self, *, mask_fraction: float = 0.15, dynamic_masking: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()
        if self.vocab_size <= NUM_BYTES:
            raise ValueError(
                f"data.vocab_size is {self.vocab_size}, but a byte-level vocabulary with a mask token has at least "
                f"{NUM_BYTES + 1} tokens."
            )
        self.mask_fraction = mask_fraction
        self.dynamic_masking = dynamic_masking

    @property
    def mask_token(self) -> int:
        """The token that hides others."""
        return self.vocab_size - 1

    @property
    def _num_tokens(self) -> int:
        return self.vocab_size - 1

    def make_blocks(self, tokens: Tensor, *, is_train: bool) -> Dataset[dict[str, Tensor]]:
        return MaskedBlocks(
            tokens,
            self.block_size,
            mask_token=self.mask_token,
            mask_fraction=self.mask_fraction,
            dynamic=is_train and self.dynamic_masking,
            always_mask=not is_train,
        )
