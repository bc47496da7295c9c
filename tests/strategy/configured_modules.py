"""Modules that are built in `configure_model`, large enough that their parameters are not made at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.strategy.modules import WIDTH, LanguageModule, MlpModule

INNER = 144  # times WIDTH: large


class ConfiguredModule(MlpModule):
    """As `MlpModule`, wide inside."""

    def __init__(self, *, is_guarded: bool = True, stateful: bool = False, **options: Any) -> None:
        super().__init__(**options, depth=0)
        self.depth = 4
        self.is_guarded = is_guarded
        self.stateful = stateful
        del self.head

    def configure_model(self) -> None:
        if self.is_guarded and len(self.blocks) > 0:
            return
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)) for _ in range(self.depth)
        )
        for block in self.blocks[::2]:
            nn.init.trunc_normal_(block[0].weight, std=0.2)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 2 * INNER * WIDTH).view(-1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table.mean()
        return super().forward(x)

    def configure_optimizers(self) -> Any:
        if self.stateful:  # it makes its state at once
            return torch.optim.Adagrad(self.parameters(), lr=self.lr, initial_accumulator_value=0.1)
        return super().configure_optimizers()


class ConfiguredLanguageModule(LanguageModule):
    """Recurrent, with tied weights and normalized ones."""

    VOCABULARY = INNER

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, depth=0)
        del self.embedding, self.head
        self.recurrent: nn.Module | None = None

    def configure_model(self) -> None:
        if self.recurrent is not None:
            return
        self.embedding = nn.Embedding(self.VOCABULARY, WIDTH, padding_idx=3)
        self.recurrent = nn.LSTM(WIDTH, 2 * INNER, batch_first=True)
        self.back = nn.utils.parametrizations.weight_norm(nn.Linear(2 * INNER, WIDTH))
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, INNER, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.head(self.layers(self.back(hidden)))


class LargeModule(ConfiguredModule):
    """Of 96 MB, in 24 layers, whose values do not explode."""

    LAYER_WIDTH = 1024
    NUM_LAYERS = 24

    def configure_model(self) -> None:
        if not self.blocks:
            self.blocks = nn.ModuleList(
                nn.Linear(self.LAYER_WIDTH, self.LAYER_WIDTH, bias=False) for _ in range(self.NUM_LAYERS)
            )
            self.head = nn.Linear(self.LAYER_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return MlpModule.forward(self, x.repeat(1, self.LAYER_WIDTH // WIDTH))
