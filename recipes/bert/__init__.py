"""BERT, a masked language model, of any size."""

from recipes.bert.module import BertModule

__all__ = ["BertModule"]
