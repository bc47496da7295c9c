"""Blocks of tokens with some of them hidden, for a masked language model."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.text.blocks import IGNORE_INDEX


class MaskedBlocks(Dataset[dict[str, Tensor]]):
    """A token sequence in consecutive blocks, each with some positions chosen as targets.

    What stands at a chosen position is replaced: in 80 % of the cases by the mask token, in 10 % by a random token, and
    in 10 % it stays, as BERT was trained (Devlin et al. 2019, section 3.1). With ``always_mask`` the mask token stands
    at every chosen position, so that a token can be told from its context alone; that is the way to measure, because
    what stays gives itself away.

    The choice is part of reading the data, not of the training step: it then depends neither on the number of
    micro-batches nor on the number of stages.

    Args:
        tokens: int64, shape ``[num_tokens]``.
        block_size: Tokens per block. The last block reaches back as far as it takes to be as long as the others.
        mask_token: The token that hides others; all smaller numbers are the vocabulary.
        mask_fraction: Fraction of a block's positions that are chosen, at least one of them.
        dynamic: Choose anew whenever a block is read, from torch's random state, so that each epoch differs (Liu et al.
            2019, section 4.1). Otherwise the choice depends on the number of the block and on nothing else.
        always_mask: Put the mask token at every chosen position.
    """

    def __init__(
        self,
        tokens: Tensor,
        block_size: int,
        *,
        mask_token: int,
        mask_fraction: float,
        dynamic: bool,
        always_mask: bool,
    ) -> None:
        if not 0.0 < mask_fraction <= 1.0:
            raise ValueError(f"data.mask_fraction is {mask_fraction}; it must be above 0 and at most 1.")
        self.tokens = tokens
        self.block_size = block_size
        self.mask_token = mask_token
        self.mask_fraction = mask_fraction
        self.dynamic = dynamic
        self.always_mask = always_mask

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.block_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Give ``input_ids`` and ``labels``, both int64 of shape ``[block_size]``."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = max(0, min(index * self.block_size, len(self.tokens) - self.block_size))
        block = self.tokens[start : start + self.block_size]
        # The index takes part in both cases: replicas have the same random state, but read different blocks.
        draw = int(torch.randint(2**62, ())) if self.dynamic else 0
        rng = random.Random(f"{draw} {index}")
        input_ids = block.clone()
        labels = torch.full_like(block, IGNORE_INDEX)
        for position in self._choose(len(block), rng):
            labels[position] = block[position]
            input_ids[position] = self._replacement(int(block[position]), rng)
        return {"input_ids": input_ids, "labels": labels}

    def _choose(self, length: int, rng: random.Random) -> list[int]:
        return rng.sample(range(length), max(1, round(length * self.mask_fraction)))

    def _replacement(self, token: int, rng: random.Random) -> int:
        if self.always_mask:
            return self.mask_token
        draw = rng.random()
        if draw < 0.8:
            return self.mask_token
        return rng.randrange(self.mask_token) if draw < 0.9 else token
