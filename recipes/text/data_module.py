"""A text as batches of token blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.text.blocks import IGNORE_INDEX, TokenBlocks, collate_blocks
from recipes.text.corpus import Corpus, CorpusError, HubText, load_corpus
from recipes.text.entropy import unigram_entropy
from recipes.text.tokenizer import cached_tokenizer


class TextDataModule(LightningDataModule):
    """The first 90 % of a text to train on and the held-out last 10 % to validate, test and predict on.

    Batches are dicts of ``input_ids`` and ``labels``, int64 of shape ``[batch_size, block_size]`` (the last batch may
    be smaller). The tokenizer is trained on the training part alone.

    Args:
        text_file: A UTF-8 text; None takes the help topics that come with Python, which need no download.
        vocab_size: Tokens in the vocabulary, 256 or more; a short text may fill only a part of it.
        block_size: Tokens in a block.
        batch_size: Blocks in a batch. With several replicas each of them gets batches of this size.
        num_workers: Processes that prepare batches; 0 does it in the training process, which is fast enough here.
        cache_dir: Where trained tokenizers are kept.
        hub_text: A Hugging Face data set instead of a text file: ``path``, and if need be ``name``, ``split`` and
            ``column``. Needs ``pip install datasets``.
    """

    def __init__(
        self,
        *,
        text_file: str | None = None,
        vocab_size: int = 1024,
        block_size: int = 128,
        batch_size: int = 16,
        num_workers: int = 0,
        cache_dir: str = ".cache/recipes",
        hub_text: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.text_file = text_file
        self.hub_text = None if hub_text is None else HubText(**hub_text)
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir)
        self.tokenizer: Tokenizer | None = None
        self._train: Dataset[dict[str, Tensor]] | None = None
        self._held_out: Dataset[dict[str, Tensor]] | None = None

    def prepare_data(self) -> None:
        """Train the tokenizer, once a machine, so that the processes find it in the cache."""
        if self.tokenizer is None:
            self._cached_tokenizer(load_corpus(self.text_file, self.hub_text))

    def setup(self, stage: str | None = None) -> None:
        """Encode the text; a data module restored from a checkpoint keeps that checkpoint's tokenizer.

        Raises:
            CorpusError: One of the two parts has fewer than two tokens.
        """
        if self._train is not None:
            return
        corpus = load_corpus(self.text_file, self.hub_text)
        if self.tokenizer is None:
            self.tokenizer = self._cached_tokenizer(corpus)
        self._train = self.make_blocks(self._encode(self.tokenizer, corpus.train), is_train=True)
        self._held_out = self.make_blocks(self._encode(self.tokenizer, corpus.held_out), is_train=False)

    def make_blocks(self, tokens: Tensor, *, is_train: bool) -> Dataset[dict[str, Tensor]]:
        """Give a part of the text, int64 of shape ``[num_tokens]``, as blocks; another objective may want others."""
        return TokenBlocks(tokens, self.block_size)

    @property
    def held_out_entropy(self) -> float:
        """The unigram entropy of the held-out targets in nats: the least loss of a model that ignores the context."""
        blocks: Any = _ready(self._held_out)
        labels = torch.cat([blocks[index]["labels"] for index in range(len(blocks))])
        return unigram_entropy(labels[labels != IGNORE_INDEX])

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._train, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._held_out, shuffle=False)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._held_out, shuffle=False)

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._held_out, shuffle=False)

    def state_dict(self) -> dict[str, Any]:
        """Put the tokenizer into the checkpoint: without it the model's tokens mean nothing."""
        return {} if self.tokenizer is None else {"tokenizer": self.tokenizer.to_str()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the checkpoint's tokenizer.

        Raises:
            CorpusError: The text was already encoded with a different one, trained on another text.
        """
        if "tokenizer" not in state_dict:
            return
        if self._train is None:
            self.tokenizer = Tokenizer.from_str(state_dict["tokenizer"])
        elif self.tokenizer is None or self.tokenizer.to_str() != state_dict["tokenizer"]:
            raise CorpusError(
                "The checkpoint was trained with another tokenizer than the one of this text (data.text_file) and "
                f"vocabulary (data.vocab_size={self.vocab_size}): its tokens mean something else. Use the checkpoint's "
                "text and vocabulary, or TextDataModule.load_from_checkpoint, which keeps its tokenizer."
            )

    def _cached_tokenizer(self, corpus: Corpus) -> Tokenizer:
        return cached_tokenizer(corpus.train, vocab_size=self._num_tokens, cache_dir=self.cache_dir)

    @property
    def _num_tokens(self) -> int:
        """How many tokens the tokenizer may have."""
        return self.vocab_size

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str) -> Tensor:
        tokens = torch.tensor(tokenizer.encode(text).ids, dtype=torch.int64)
        if len(tokens) < 2:
            raise CorpusError(
                f"A part of the text has {len(tokens)} tokens; at least 2 are needed. Set data.text_file."
            )
        return tokens

    def _loader(self, blocks: Dataset[dict[str, Tensor]] | None, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            _ready(blocks),
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=collate_blocks,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _ready(blocks: Dataset[dict[str, Tensor]] | None) -> Dataset[dict[str, Tensor]]:
    if blocks is None:
        raise RuntimeError("Call setup() of the data module first; a Trainer does.")
    return blocks
