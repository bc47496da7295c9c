"""GPT-2, a causal language model, of any size."""

from recipes.gpt2.module import GPT2Module

__all__ = ["GPT2Module"]
