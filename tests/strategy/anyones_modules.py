"""Modules of all kinds: what users bring, and what was found to break pipelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tests.capture.models import ScaledSquare
from tests.strategy.modules import WIDTH, Gpt2Module, InOrder, LanguageModule, MlpModule, in_order, token_data


class CausalModule(Gpt2Module):
    """GPT-2 with a loss in double precision, and what users do to it."""

    def __init__(self, *, recompute: bool = False, low_rank: bool = False, **options: Any) -> None:
        super().__init__(**options)
        if recompute:
            self.net.gradient_checkpointing_enable({"use_reentrant": False})
        if low_rank:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False)
            self.net = get_peft_model(self.net, config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        token_ids, labels, *mask = batch
        logits = self.net(input_ids=token_ids, attention_mask=mask[0] if mask else None, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("train_loss", loss, on_epoch=True)
        return loss


class SeveralLengths(InOrder):
    """Each batch is as long as its longest sequence; some are not padded at all."""

    LENGTHS = (5, 7, 3, 4, 6, 6, 6, 6, 2, 3, 1, 2)

    def __init__(self, **options: Any) -> None:
        super().__init__([token_data(1, length, seed=length)[0][0] for length in self.LENGTHS], **options)

    def train_dataloader(self) -> Any:
        return in_order(self.trainer.lightning_module, self.train, self.batch_size, collate_fn=padded)


def padded(sequences: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    labels = pad_sequence([torch.cat([ids[1:], ids.new_tensor([-100])]) for ids in sequences], True, -100)
    mask = pad_sequence([torch.ones_like(ids) for ids in sequences], True, 0)
    return pad_sequence(sequences, True, 0), labels, mask


class RecurrentModule(LanguageModule):
    """LSTMs, which keep references of their own to their parameters, between tied weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, depth=0)
        self.first = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden, _ = self.first(self.embedding(token_ids))
        return self.head(self.second(hidden)[0])


class WeightNormModule(MlpModule):
    """Every weight is a direction and a length."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block[0])


class CustomFunctionModule(MlpModule):
    """A function with a gradient of its own between any two layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            squared, shifted = ScaledSquare.apply(block(x), scale, 2)
            x = (squared + shifted).tanh()
        return self.head(x).squeeze(-1)


class InPlaceModule(MlpModule):
    """Written in place on either side of any cut."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            x[:, 0] = 0
            x = F.relu(x, inplace=True)
        return self.head(x).squeeze(-1)


class TwoTowersModule(MlpModule):
    """Contrastive: the samples of a batch are one another's negatives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        one = other = x
        for block in self.blocks:
            one = block(one)
        other = self.other(x.flip(1))
        similarity = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).t()
        loss = F.cross_entropy(similarity * self.head.weight.exp().sum(), torch.arange(len(x)))
        self.log("train_loss", loss)
        return loss


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if x.sum() > 0 else self.negative(x).tanh()


class BranchingModule(MlpModule):
    """`if h.sum() > 0:` inside a module between two layers; each branch is taken by some batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[1] = Branch()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)


class RotaryModule(LanguageModule):
    """Row 19: one module called at several separated points."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rotary = Rotary()

    def forward(self, token_ids: Tensor) -> Tensor:
        h = self.embedding(token_ids)
        for index, block in enumerate(self.blocks):
            h = h + block(self.rotary(h) if index in (0, 2) else h)
        return self.head(self.rotary(h))


class RecomputedStartModule(LanguageModule):
    """Row 21: everything before the first cut is recomputed, from token ids, which require no gradient."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = nn.Linear(WIDTH, self.VOCABULARY)
        self.start = nn.Linear(WIDTH, WIDTH)

    def beginning(self, token_ids: Tensor) -> Tensor:
        return self.start(self.embedding(token_ids))

    def forward(self, token_ids: Tensor) -> Tensor:
        h = checkpoint(self.beginning, token_ids, use_reentrant=False)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)
