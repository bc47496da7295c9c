"""Text for language models: a corpus that needs no download, a tokenizer trained on it, blocks of tokens."""

from recipes.text.data_module import TextDataModule
from recipes.text.masked_data_module import MaskedTextDataModule

__all__ = ["MaskedTextDataModule", "TextDataModule"]
