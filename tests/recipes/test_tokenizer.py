"""The tokenizer and its cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.text import tokenizer as tokenizer_module
from recipes.text.tokenizer import cached_tokenizer, train_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, then the quick fox sleeps\n" * 20


@pytest.mark.parametrize("text", [TEXT, "größer, ∑ 你好 🙂", "tabs\tand  spaces \n\n", ""])
def test_every_text_comes_back(text: str) -> None:
    tokenizer = train_tokenizer(TEXT, vocab_size=300)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_vocabulary_is_at_most_as_large_as_asked() -> None:
    assert train_tokenizer(TEXT, vocab_size=280).get_vocab_size() == 280
    assert train_tokenizer("ab", vocab_size=280).get_vocab_size() == 257


def test_training_is_deterministic() -> None:
    assert train_tokenizer(TEXT, vocab_size=300).to_str() == train_tokenizer(TEXT, vocab_size=300).to_str()


def test_vocabulary_smaller_than_the_bytes() -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size is 255, .* at least 256"):
        train_tokenizer(TEXT, vocab_size=255)


def test_cache_is_used_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_tokenizer(TEXT, vocab_size=300, cache_dir=tmp_path / "cache")

    def train_again(text: str, *, vocab_size: int) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(tokenizer_module, "train_tokenizer", train_again)
    assert cached_tokenizer(TEXT, vocab_size=300, cache_dir=tmp_path / "cache").to_str() == first.to_str()
    with pytest.raises(AssertionError, match="trained again"):
        cached_tokenizer(TEXT + "!", vocab_size=300, cache_dir=tmp_path / "cache")
    with pytest.raises(AssertionError, match="trained again"):
        cached_tokenizer(TEXT, vocab_size=301, cache_dir=tmp_path / "cache")


def test_many_may_fill_the_cache_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(cached_tokenizer, TEXT, vocab_size=300, cache_dir=tmp_path) for _ in range(8)]
        assert len({future.result().to_str() for future in futures}) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        cached_tokenizer(TEXT, vocab_size=300, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
