"""Blocks of tokens, their batches, and the entropy of their frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.text.blocks import IGNORE_INDEX, TokenBlocks, collate_blocks
from recipes.text.entropy import unigram_entropy


@given(num_tokens=st.integers(2, 60), block_size=st.integers(1, 20))
def test_every_token_but_the_first_is_a_target_once(num_tokens: int, block_size: int) -> None:
    blocks = TokenBlocks(torch.arange(num_tokens), block_size)
    items = [blocks[index] for index in range(len(blocks))]
    assert torch.cat([item["labels"] for item in items]).tolist() == list(range(1, num_tokens))
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(num_tokens - 1))
    assert [len(item["labels"]) for item in items[:-1]] == [block_size] * (len(items) - 1)
    assert 1 <= len(items[-1]["labels"]) <= block_size


def test_blocks_end() -> None:
    blocks = TokenBlocks(torch.arange(9), 4)
    assert len(blocks) == 2
    with pytest.raises(IndexError, match="block 2 of 2"):
        blocks[2]


def test_a_short_block_is_filled_up_with_targets_that_do_not_count() -> None:
    blocks = TokenBlocks(torch.arange(7), 4)
    batch = collate_blocks([blocks[0], blocks[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [5, 6, IGNORE_INDEX, IGNORE_INDEX]]


def test_entropy_of_equal_frequencies_is_their_logarithm() -> None:
    assert unigram_entropy(torch.arange(7).repeat(3)) == pytest.approx(math.log(7))
    assert unigram_entropy(torch.zeros(5, dtype=torch.int64)) == 0.0


def test_entropy_is_the_least_mean_loss_without_context() -> None:
    tokens = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0)).pow(2)
    frequencies = tokens.bincount().double() / len(tokens)
    assert unigram_entropy(tokens) == pytest.approx(float(-frequencies[tokens].log().mean()))
