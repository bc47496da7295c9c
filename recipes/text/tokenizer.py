"""A byte-level BPE trained on the training part of a corpus, and kept on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# What a byte-level vocabulary has at least.
NUM_BYTES = 256

# Part of the cached file's name: change it when the way of training changes.
_RECIPE = "byte-level-bpe-1"


def cached_tokenizer(text: str, *, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """Give the tokenizer trained on ``text``, read from ``cache_dir`` where it was trained before.

    Any number of processes may call this at once: the file appears complete or not at all, and training is
    deterministic, so that all of them get the same tokenizer.
    """
    path = cache_dir / f"tokenizer-{_fingerprint(text, vocab_size)}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(text, vocab_size=vocab_size)
    _write_atomically(path, tokenizer.to_str())
    return tokenizer


def train_tokenizer(text: str, *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` tokens; every text can be encoded, for all 256 bytes are in it.

    Raises:
        ValueError: ``vocab_size`` is less than the 256 tokens that the bytes alone take.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet):
        raise ValueError(
            f"data.vocab_size is {vocab_size}, but a byte-level vocabulary has at least {len(alphabet)} tokens."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def _fingerprint(text: str, vocab_size: int) -> str:
    return hashlib.sha256(f"{_RECIPE} {vocab_size} {text}".encode()).hexdigest()[:16]


def _write_atomically(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
