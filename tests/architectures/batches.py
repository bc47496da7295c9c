"""Batches of two samples; 8 targets count where there are several in a sample."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 16
IMAGE_SIZE = 16


def token_ids(length: int = 5, *, seed: int = 1, num_samples: int = 2, below: int = VOCABULARY) -> Tensor:
    return torch.randint(1, below, (num_samples, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding(length: int, num_valid: int) -> Tensor:
    """A mask that hides the end of the second sample."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, num_valid:] = 0
    return mask


def causal() -> dict[str, Tensor]:
    return {"input_ids": token_ids(), "labels": token_ids()}


def causal_padded() -> dict[str, Tensor]:
    return {**causal(), "attention_mask": padding(5, 3)}


def masked() -> dict[str, Tensor]:
    """Every other token is a target; padding is none."""
    labels = token_ids(8)
    labels[0, 1::2] = -100
    labels[1, [1, 3, 6, 7]] = -100
    return {"input_ids": token_ids(8, seed=2), "labels": labels, "attention_mask": padding(8, 6)}


def masked_whole() -> dict[str, Tensor]:
    return {"input_ids": token_ids(4, seed=2), "labels": token_ids(4)}


def sequence_pairs() -> dict[str, Tensor]:
    return {"input_ids": token_ids(), "labels": token_ids(4, seed=2), "attention_mask": padding(5, 3)}


def images(size: int = IMAGE_SIZE) -> dict[str, Tensor]:
    return {"pixel_values": numbers(2, 3, size, size), "labels": torch.tensor([1, 0])}
