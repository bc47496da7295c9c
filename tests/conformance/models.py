"""Modules of the conformance tests of models and of what users of pipelines have reported."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import WIDTH, LanguageModule, MlpModule


class DropoutModule(MlpModule):
    """Draws in every block, which is recomputed in the backward where that is asked for."""

    def __init__(self, *, recomputed: bool | None = None, **options: Any) -> None:
        """`recomputed`: not (None), or whether re-entrantly."""
        super().__init__(**options, depth=6)
        for block in self.blocks:
            block.append(nn.Dropout(0.4))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # what re-entrant recomputation asks for
        for block in self.blocks:
            x = block(x) if self.recomputed is None else checkpoint(block, x, use_reentrant=self.recomputed)
        return self.head(x).squeeze(-1)


class RecomputedModule(MlpModule):
    """Blocks that are recomputed."""

    def __init__(self, *, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).squeeze(-1)


class RecomputedIdsModule(LanguageModule):
    """Row 21: an embedding of ids and a layer are recomputed as one; no input of that requires grad.

    torch's re-entrant kind gives such a region no gradients, whatever runs it; its documentation asks for an input
    that requires one.
    """

    def __init__(self, *, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        needs_grad = torch.zeros((), dtype=self.embedding.weight.dtype, requires_grad=self.reentrant)
        h = checkpoint(self._begin, tokens, needs_grad, use_reentrant=self.reentrant)
        for block in self.blocks[1:]:
            h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h)

    def _begin(self, tokens: Tensor, needs_grad: Tensor) -> Tensor:
        return self.blocks[0](self.embedding(tokens) + needs_grad)


class StatisticsModule(MlpModule):
    """A normalization beside each block: what one sees does not depend on how another normalizes. Learns nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, depth=6, lr=0.0)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH, momentum=m) for m in (0.1, None, 0.3, 0.1, None, 0.2))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = block(x)
            total = total + norm(x)
        return self.head(total).squeeze(-1)


class NormalizedModule(MlpModule):
    """With normalizations between layers."""

    def __init__(self, *, norm: type[nn.Module], **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.append(norm(WIDTH))


class LazyModule(MlpModule):
    """The size of a layer is left to its first input; `ready` shows it one."""

    def __init__(self, *, ready: bool, **options: Any) -> None:
        super().__init__(**options)
        self.blocks.append(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()))
        if ready:
            self.blocks[-1](torch.zeros(2, WIDTH))

    def double(self) -> LazyModule:
        return super().double() if not isinstance(self.blocks[-1][0].weight, nn.UninitializedParameter) else self


class CacheModule(LanguageModule):
    """Row 13: hidden states with gradient, a cache without one, and an integer mask, on all stages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        cache, mask = (h.detach() * self.frequencies).cos(), (h > 0).long()
        for block in self.blocks:
            h = h + block(h) * cache * mask
        return self.head(h)


class SkipModule(MlpModule):
    """Row 18: block 0's output is added in block 3."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:3]:
            x = block(x)
        return self.head(self.blocks[3](x + first)).squeeze(-1)


class PaddedBertModule(MlpModule):
    """Row 16: BERT with its loss inside, on sequences that are padded for real; the last ones to unlike lengths."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, depth=0)
        from transformers import BertConfig, BertForMaskedLM

        del self.head
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
        self.net = BertForMaskedLM(
            BertConfig(
                vocab_size=LanguageModule.VOCABULARY,
                max_position_embeddings=16,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                **sizes,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        lengths = 1 + tokens[:, 0] % tokens.shape[1]
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        loss = self.net(input_ids=tokens, attention_mask=mask, labels=labels).loss
        self.log("train_loss", loss, on_epoch=True)
        return loss


class NothingChanges(Callback):
    """Row 6: takes a print of everything before and after a module is planned, measured and verified."""

    def __init__(self) -> None:
        self.is_unchanged: bool | None = None

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if not isinstance(strategy, AutoPipeStrategy):
            self.is_unchanged = True
            return
        session: Any = strategy.session
        plan = session.plan

        def watched(*args: Any, **kwargs: Any) -> None:
            before = self._print(module)
            plan(*args, **kwargs)
            self.is_unchanged = before == self._print(module)

        session.plan = watched

    def _print(self, module: nn.Module) -> Any:
        import numpy as np

        return (
            {name: tensor.tolist() for name, tensor in module.state_dict().items()},
            [parameter.grad is None for parameter in module.parameters()],
            [(sorted(sub.__dict__), sub.training) for sub in module.modules()],
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
        )


def what_changed(trainer: Any, module: Any) -> bool | None:
    """What `NothingChanges` found."""
    return next(callback.is_unchanged for callback in trainer.callbacks if isinstance(callback, NothingChanges))


def buffers(trainer: Any, module: Any) -> dict[str, Any] | None:
    """The module's buffers as lists, where it is whole."""
    return None if not trainer.is_global_zero else {name: buffer.tolist() for name, buffer in module.named_buffers()}
