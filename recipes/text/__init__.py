"""Text for language models: a corpus that needs no download, a tokenizer trained on it, blocks of tokens."""

from recipes.text.data_module import TextDataModule

__all__ = ["TextDataModule"]
