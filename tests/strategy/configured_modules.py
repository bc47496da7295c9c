"""Modules that are built in `configure_model`, large enough that their parameters are not made at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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


class ConfiguredCausalModule(MlpModule):
    """GPT-2 by transformers, from its configuration or (with a folder) from a pretrained model."""

    def __init__(self, *, folder: Path | None = None, **options: Any) -> None:
        super().__init__(**options, depth=0)
        del self.head
        self.folder = folder
        self.net: Any = None

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config

        if self.net is not None:
            return
        if self.folder is not None:
            self.net = AutoModelForCausalLM.from_pretrained(self.folder)
            return
        sizes = {"vocab_size": LanguageModule.VOCABULARY, "n_positions": 8, "n_embd": 32, "n_layer": 2, "n_head": 2}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
        self.net = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        logits = self.net(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("train_loss", loss, on_epoch=True)
        return loss


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


class MediumModule(LargeModule):
    """Of 24 MB."""

    LAYER_WIDTH = 512
