"""The text and its split."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from recipes.text.corpus import CorpusError, load_corpus, read_help_topics


def test_help_topics_are_split_after_nine_tenths() -> None:
    text = read_help_topics()
    corpus = load_corpus(None)
    assert len(text) > 300_000
    assert corpus.train + corpus.held_out == text
    assert len(corpus.train) == int(0.9 * len(text))


def test_help_topics_are_the_same_every_time() -> None:
    assert read_help_topics() == read_help_topics()


def test_a_text_file_replaces_the_help_topics(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("größer " * 10, encoding="utf-8")
    corpus = load_corpus(path)
    assert corpus.train + corpus.held_out == "größer " * 10
    assert len(corpus.train) == 63


def test_missing_text_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt.*data\.text_file.*does not exist.*relative path counts from"):
        load_corpus(tmp_path / "nowhere.txt")


def test_folder_for_a_text_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="cannot be read: Is a directory"):
        load_corpus(tmp_path)


def test_binary_text_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(CorpusError, match=r"is not UTF-8 text: .* at byte 3"):
        load_corpus(path)


@pytest.mark.parametrize("text", ["", "a", " \n" * 100, "word" + " " * 100])
def test_text_that_is_too_short(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=rf"has {len(text)} characters of text: too few.*Set data\.text_file"):
        load_corpus(path)


def test_python_without_help_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", no_module)
    with pytest.raises(CorpusError, match=r"without its help topics.*Set data\.text_file"):
        load_corpus(None)
