"""Blocks with hidden tokens, and their data module."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipes.text import MaskedTextDataModule
from recipes.text.blocks import IGNORE_INDEX
from recipes.text.entropy import unigram_entropy
from recipes.text.masking import MaskedBlocks

MASK = 90


def make_blocks(tokens: Tensor, block_size: int = 20, **settings: Any) -> MaskedBlocks:
    return MaskedBlocks(
        tokens,
        block_size,
        **{"mask_token": MASK, "mask_fraction": 0.15, "dynamic": False, "always_mask": False} | settings,
    )


@given(num_tokens=st.integers(1, 70), block_size=st.integers(1, 30), fraction=st.floats(0.01, 1.0))
def test_blocks_cover_the_text_and_have_targets(num_tokens: int, block_size: int, fraction: float) -> None:
    tokens = torch.arange(num_tokens)
    blocks = make_blocks(tokens, block_size, mask_fraction=fraction)
    seen = set()
    for index in range(len(blocks)):
        block = blocks[index]
        length = min(block_size, num_tokens)
        assert block["input_ids"].shape == block["labels"].shape == (length,)
        is_target = block["labels"] != IGNORE_INDEX
        assert is_target.sum() == max(1, round(length * fraction))
        start = int((block["input_ids"] - torch.arange(length))[~is_target].median()) if not is_target.all() else None
        if start is not None:
            whole = torch.where(is_target, block["labels"], block["input_ids"])
            assert whole.tolist() == tokens[start : start + length].tolist()
            seen |= set(whole.tolist())
        else:
            seen |= set(block["labels"].tolist())
    assert seen == set(range(num_tokens))


def test_blocks_end() -> None:
    with pytest.raises(IndexError, match="block 2 of 2"):
        make_blocks(torch.arange(40))[2]


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_fractions_that_are_none(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"data\.mask_fraction is .*above 0 and at most 1"):
        make_blocks(torch.arange(40), mask_fraction=fraction)


def test_what_stands_at_chosen_positions() -> None:
    """80 % mask token, 10 % random, 10 % as it was: within five standard deviations of 15,000 draws."""
    tokens = torch.arange(100_000) % MASK
    blocks = make_blocks(tokens, 100)
    kinds: Counter[str] = Counter()
    random_tokens: Counter[int] = Counter()
    for index in range(len(blocks)):
        block = blocks[index]
        for token, label in zip(block["input_ids"].tolist(), block["labels"].tolist(), strict=True):
            if label != IGNORE_INDEX:
                kind = "mask" if token == MASK else "same" if token == label else "other"
                kinds[kind] += 1
                random_tokens[token] += kind == "other"
    total = kinds.total()
    assert total == 15_000
    # One random token in 90 is by chance the same.
    for kind, share in {"mask": 0.8, "other": 0.1 * (1 - 1 / MASK), "same": 0.1 * (1 + 1 / MASK)}.items():
        assert kinds[kind] / total == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / total)), kind
    assert all(0 <= token < MASK for token, count in random_tokens.items() if count)
    assert len([token for token, count in random_tokens.items() if count]) == MASK


def test_held_out_tokens_are_all_hidden_and_always_the_same_ones() -> None:
    tokens = torch.arange(80)
    blocks = make_blocks(tokens, always_mask=True)
    torch.manual_seed(0)
    before = [blocks[index] for index in range(len(blocks))]
    torch.manual_seed(1)
    after = [make_blocks(tokens, always_mask=True)[index] for index in reversed(range(len(blocks)))][::-1]
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
        assert torch.equal(first["labels"], second["labels"])
        assert (first["input_ids"][first["labels"] != IGNORE_INDEX] == MASK).all()
    positions = [(block["labels"] != IGNORE_INDEX).nonzero().flatten().tolist() for block in before]
    assert len({tuple(position) for position in positions}) > 1, "each block has positions of its own"
    # Part of the promise "in every run": the same on another machine and under another version of torch.
    assert positions[0] == [5, 8, 11], positions[0]


def test_training_hides_other_tokens_each_time_but_follows_the_seed() -> None:
    blocks = make_blocks(torch.arange(80), dynamic=True)

    def read(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return [blocks[0]["labels"].tolist(), blocks[0]["labels"].tolist(), blocks[1]["labels"].tolist()]

    first, again, other_block = read(0)
    assert first != again
    assert read(0) == [first, again, other_block]


def test_replicas_with_one_random_state_hide_different_tokens() -> None:
    blocks = make_blocks(torch.zeros(800, dtype=torch.int64), dynamic=True)
    chosen = []
    for index in range(10):
        torch.manual_seed(0)
        chosen.append(tuple(blocks[index]["labels"].tolist()))
    assert len(set(chosen)) > 5


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 30, encoding="utf-8")
    return path


def make_data(text_file: Path, **settings: Any) -> MaskedTextDataModule:
    data = MaskedTextDataModule(
        text_file=str(text_file),
        **{"vocab_size": 280, "block_size": 16, "batch_size": 4, "cache_dir": str(text_file.parent)} | settings,
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_the_last_token_of_the_vocabulary_hides(text_file: Path) -> None:
    data = make_data(text_file)
    assert data.tokenizer is not None
    assert data.mask_token == 279
    assert data.tokenizer.get_vocab_size() <= 279
    batch = next(iter(data.val_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    assert ((batch["input_ids"] == 279) == (batch["labels"] != IGNORE_INDEX)).all()


def test_dynamic_and_static_masking(text_file: Path) -> None:
    def labels(data: MaskedTextDataModule) -> list[Any]:
        return [batch["labels"].tolist() for batch in data.train_dataloader()]

    for dynamic in (True, False):
        data = make_data(text_file, dynamic_masking=dynamic)
        masks = [sorted(str(block) for batch in labels(data) for block in batch) for _ in range(2)]
        assert (masks[0] == masks[1]) == (not dynamic)


def test_entropy_is_that_of_the_hidden_tokens(text_file: Path) -> None:
    data = make_data(text_file)
    targets = torch.cat([batch["labels"].flatten() for batch in data.val_dataloader()])
    assert data.held_out_entropy == pytest.approx(unigram_entropy(targets[targets != IGNORE_INDEX]))


def test_settings_come_back_from_a_checkpoint(text_file: Path) -> None:
    data = make_data(text_file, mask_fraction=0.3)
    assert dict(data.hparams) == {
        "text_file": str(text_file),
        "vocab_size": 280,
        "block_size": 16,
        "batch_size": 4,
        "cache_dir": str(text_file.parent),
        "mask_fraction": 0.3,
        "dynamic_masking": True,
    } | {name: data.hparams[name] for name in ("num_workers", "hub_text") if name in data.hparams}
    again = MaskedTextDataModule(**data.hparams)
    assert (again.mask_fraction, again.block_size, again.mask_token) == (0.3, 16, 279)


def test_a_vocabulary_without_room_for_the_mask_token() -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size is 256, .* with a mask token has at least 257 tokens"):
        MaskedTextDataModule(vocab_size=256)
