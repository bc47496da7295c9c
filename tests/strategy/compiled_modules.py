"""Modules of which a part, or the whole, is given to `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.strategy.modules import MlpModule


@torch.compile(backend="eager")
def squashed(x: Tensor) -> Tensor:
    return x.tanh() + 1.0


class CompiledModule(MlpModule):
    """`how`: "blocks" (each by `compile()`), "net" (a wrapped submodule), "function" (inside the step)."""

    def __init__(self, *, how: str, backend: str = "eager", **options: Any) -> None:
        super().__init__(**options)
        self.how = how
        if how == "blocks":
            for block in self.blocks:
                block.compile(backend=backend)
        elif how == "net":
            self.net = torch.compile(torch.nn.Sequential(*self.blocks), backend=backend)
            del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "net":
            return self.head(self.net(x)).squeeze(-1)
        if self.how == "function":
            x = squashed(x)
            for block in self.blocks:
                x = squashed(block(x))
            return self.head(x).squeeze(-1)
        return super().forward(x)
