"""The text that a language model is trained on, and its split."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

TRAIN_FRACTION = 0.9


class CorpusError(ValueError):
    """The text to train on is missing, unreadable or too short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text in two parts: the first 90 % of its characters to train on, the held-out last 10 % to validate on."""

    train: str
    held_out: str


def load_corpus(text_file: str | Path | None) -> Corpus:
    """Give the text of ``text_file`` (UTF-8), or of Python's own help topics where it is None, split for training.

    Raises:
        CorpusError: The file cannot be read, is no UTF-8 text, or has no text to split.
    """
    source = "Python's help topics" if text_file is None else f"the text file {str(text_file)!r} (data.text_file)"
    text = read_help_topics() if text_file is None else _read_file(Path(text_file), source)
    split_at = int(len(text) * TRAIN_FRACTION)
    corpus = Corpus(train=text[:split_at], held_out=text[split_at:])
    if not corpus.train.strip() or not corpus.held_out.strip():
        raise CorpusError(
            f"{source} has {len(text)} characters of text: too few to train on the first 90 % and validate on the "
            "rest. Set data.text_file to a longer text."
        )
    return corpus


def read_help_topics() -> str:
    """Give the English help topics that come with Python (about 465,000 characters), in the order of their names."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise CorpusError(
            "This Python comes without its help topics (module pydoc_data), which are the default text. "
            "Set data.text_file to a text file of yours."
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _read_file(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CorpusError(f"{source} does not exist. A relative path counts from {Path.cwd()}.") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise CorpusError(f"{source} cannot be read: {error.strerror}.") from error
