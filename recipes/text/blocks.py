"""Blocks of consecutive tokens, and batches of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

# The target of a position that does not count; the default of torch's cross entropy.
IGNORE_INDEX = -100


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """A token sequence in consecutive blocks of ``block_size`` inputs, each with the token after it as its target.

    Every token but the first is a target exactly once. The last block may be shorter.

    Args:
        tokens: int64, shape ``[num_tokens]``.
        block_size: Inputs per block.
    """

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.block_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Give ``input_ids`` and ``labels``, both int64 of shape ``[at most block_size]``."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        block = self.tokens[index * self.block_size : (index + 1) * self.block_size + 1]
        return {"input_ids": block[:-1], "labels": block[1:]}


def collate_blocks(blocks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join blocks to ``input_ids`` and ``labels`` of shape ``[batch, longest block]``.

    Shorter blocks are filled up at their end with targets that do not count; a causal model sees nothing of it before.
    """
    fill = {"input_ids": 0, "labels": IGNORE_INDEX}
    return {
        key: torch.nn.utils.rnn.pad_sequence([block[key] for block in blocks], batch_first=True, padding_value=value)
        for key, value in fill.items()
    }
