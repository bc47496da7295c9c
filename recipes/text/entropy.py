"""How well a text can be predicted without looking at what came before."""

from __future__ import annotations

from torch import Tensor


def unigram_entropy(tokens: Tensor) -> float:
    """Give the entropy in nats a token of the tokens' own frequencies.

    No model that ignores the context has a smaller mean loss on these tokens, not even one that knew their frequencies
    beforehand: a loss below it can only come from context.

    Args:
        tokens: int64, shape ``[num_tokens]``.
    """
    counts = tokens.bincount().double()
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * frequencies.log()).sum())
