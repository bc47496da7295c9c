"""The optimizer and the learning-rate schedule of all recipes: those that transformers are usually trained with."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


def adamw(module: nn.Module, *, learning_rate: float, weight_decay: float) -> AdamW:
    """Give AdamW over the module's trainable parameters, with weight decay on matrices only.

    Biases and normalization scales (fewer than two dimensions) are not decayed.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=(0.9, 0.95))


def warmup_cosine(optimizer: AdamW, *, warmup_steps: int, total_steps: float, final_fraction: float) -> LambdaLR:
    """Give a schedule that rises linearly over ``warmup_steps``, then falls along a cosine to ``final_fraction``.

    Step it once per optimizer step. With ``total_steps=math.inf`` it stays at the full rate after the warm-up.
    """
    return LambdaLR(optimizer, learning_rate_factor(warmup_steps, total_steps, final_fraction))


def learning_rate_factor(warmup_steps: int, total_steps: float, final_fraction: float) -> Callable[[int], float]:
    """Give the factor on the learning rate as a function of the optimizer step, which counts from 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if math.isinf(total_steps):
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
