"""The text that a language model is trained on, and its split."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from recipes.hub import load_hub_dataset, require_columns

TRAIN_FRACTION = 0.9


class CorpusError(ValueError):
    """The text to train on is missing, unreadable or too short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text in two parts: the first 90 % of its characters to train on, the held-out last 10 % to validate on."""

    train: str
    held_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubText:
    """A column of texts in a Hugging Face data set: ``name`` is its configuration, ``split`` as in ``train[:10%]``."""

    path: str
    name: str | None = None
    split: str = "train"
    column: str = "text"


def load_corpus(text_file: str | Path | None, hub_text: HubText | None = None) -> Corpus:
    """Give the text of ``text_file`` (UTF-8) or ``hub_text``, or else of Python's own help topics, split for training.

    Raises:
        CorpusError: The file cannot be read, is no UTF-8 text, or has no text to split; or two sources are given.
    """
    source, text = _read(text_file, hub_text)
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


def _read(text_file: str | Path | None, hub_text: HubText | None) -> tuple[str, str]:
    if hub_text is not None:
        if text_file is not None:
            raise CorpusError("Both data.text_file and data.hub_text are set. Set one of them to null.")
        return f"the data set {hub_text.path!r} (data.hub_text.path)", _read_hub(hub_text)
    if text_file is not None:
        source = f"the text file {str(text_file)!r} (data.text_file)"
        return source, _read_file(Path(text_file), source)
    return "Python's help topics", read_help_topics()


def _read_hub(hub_text: HubText) -> str:
    rows = load_hub_dataset(hub_text.path, name=hub_text.name, split=hub_text.split, setting="data.hub_text.path")
    require_columns(rows, {"data.hub_text.column": hub_text.column}, hub_text.path)
    return "\n".join(rows[hub_text.column])


def _read_file(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CorpusError(f"{source} does not exist. A relative path counts from {Path.cwd()}.") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise CorpusError(f"{source} cannot be read: {error.strerror}.") from error
