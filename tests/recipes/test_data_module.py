"""The text data module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.text import TextDataModule
from recipes.text.corpus import CorpusError, load_corpus
from recipes.text.tokenizer import train_tokenizer


def make_text_file(path: Path, *, held_out: str = "zebra zoo ") -> Path:
    path.write_text("alpha beta gamma delta " * 90 + (held_out * 300)[:230], encoding="utf-8")
    return path


def make_data(text_file: Path | None, cache_dir: Path, **settings: Any) -> TextDataModule:
    data = TextDataModule(
        text_file=None if text_file is None else str(text_file),
        **{"vocab_size": 270, "block_size": 8, "batch_size": 4, "cache_dir": str(cache_dir)} | settings,
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_tokenizer_knows_the_training_part_only(tmp_path: Path) -> None:
    data = make_data(make_text_file(tmp_path / "a.txt"), tmp_path / "a")
    other = make_data(make_text_file(tmp_path / "b.txt", held_out="quagga quark "), tmp_path / "b")
    assert data.tokenizer is not None
    assert other.tokenizer is not None
    assert data.tokenizer.to_str() == other.tokenizer.to_str()
    assert data.tokenizer.to_str() == train_tokenizer(load_corpus(tmp_path / "a.txt").train, vocab_size=270).to_str()


def test_batches_hold_the_two_parts(tmp_path: Path) -> None:
    text_file = make_text_file(tmp_path / "a.txt")
    corpus = load_corpus(text_file)
    data = make_data(text_file, tmp_path)
    assert data.tokenizer is not None

    held_out = data.tokenizer.encode(corpus.held_out).ids
    labels = torch.cat([batch["labels"].flatten() for batch in data.val_dataloader()])
    assert labels[labels >= 0].tolist() == held_out[1:]

    train = data.tokenizer.encode(corpus.train).ids
    labels = torch.cat([batch["labels"].flatten() for batch in data.train_dataloader()])
    assert sorted(labels[labels >= 0].tolist()) == sorted(train[1:])


def test_validation_test_and_prediction_read_the_same(tmp_path: Path) -> None:
    data = make_data(make_text_file(tmp_path / "a.txt"), tmp_path)
    batches = [
        [batch["input_ids"].tolist() for batch in loader]
        for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader())
    ]
    assert batches[0] == batches[1] == batches[2]


def test_batches_follow_the_seed(tmp_path: Path) -> None:
    data = make_data(make_text_file(tmp_path / "a.txt"), tmp_path)

    def order(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return [batch["input_ids"].tolist() for batch in data.train_dataloader()]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_shapes(tmp_path: Path) -> None:
    batch = next(iter(make_data(None, tmp_path, block_size=16).train_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    for leaf in batch.values():
        assert leaf.shape == (4, 16)
        assert leaf.dtype == torch.int64


def test_setup_needs_no_prepared_cache_and_may_come_twice(tmp_path: Path) -> None:
    data = TextDataModule(
        text_file=str(make_text_file(tmp_path / "a.txt")), vocab_size=270, cache_dir=str(tmp_path / "new")
    )
    data.setup("fit")
    blocks = data.train_dataloader().dataset
    data.setup("validate")
    assert data.train_dataloader().dataset is blocks


def test_loaders_before_setup() -> None:
    with pytest.raises(RuntimeError, match=r"Call setup\(\) of the data module first"):
        TextDataModule().train_dataloader()


def test_entropy_is_that_of_the_targets(tmp_path: Path) -> None:
    data = make_data(make_text_file(tmp_path / "a.txt"), tmp_path)
    labels = torch.cat([batch["labels"].flatten() for batch in data.val_dataloader()])
    counts = labels[labels >= 0].bincount().double()
    frequencies = counts[counts > 0] / counts.sum()
    assert data.held_out_entropy == pytest.approx(float(-(frequencies * frequencies.log()).sum()))


def test_a_part_of_one_token(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab ab ab z", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"has 1 tokens; at least 2 are needed\. Set data\.text_file"):
        make_data(path, tmp_path)


def test_a_checkpoint_brings_its_tokenizer(tmp_path: Path) -> None:
    data = make_data(make_text_file(tmp_path / "a.txt"), tmp_path)
    assert data.tokenizer is not None
    restored = TextDataModule(vocab_size=270, cache_dir=str(tmp_path / "unused"))
    restored.load_state_dict(data.state_dict())
    restored.prepare_data()
    restored.setup("validate")
    assert restored.tokenizer is not None
    assert restored.tokenizer.to_str() == data.tokenizer.to_str()
    assert not (tmp_path / "unused").exists()


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    data = make_data(make_text_file(tmp_path / "a.txt"), tmp_path)
    data.load_state_dict(data.state_dict())
    data.load_state_dict({})
    with pytest.raises(CorpusError, match=r"another tokenizer .*data\.vocab_size=270"):
        data.load_state_dict(make_data(None, tmp_path).state_dict())
