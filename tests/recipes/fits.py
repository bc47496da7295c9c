"""Short fits of the recipes, in one process or as one of several."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmarks.replica_order import DigitsInReplicaOrder, MaskedTextInReplicaOrder
from lightning_autopipe import AutoPipeStrategy
from recipes.bert import BertModule
from recipes.images import DigitsDataModule
from recipes.resnet import ResNetModule
from recipes.text import MaskedTextDataModule

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 40


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit; `batch_size` and `num_microbatches` are those of all replicas together."""

    recipe: str
    num_stages: int = 1
    num_replicas: int = 1
    batch_size: int = 16
    num_microbatches: int = 4
    max_epochs: int = 2
    dropout: float = 0.1
    dynamic_masking: bool = True
    replica_order: bool = False
    """One process reads what two replicas would."""
    distributed_sampler: bool = True
    """False leaves the order of samples to the loader, as the plain Trainer does with one process."""
    strategy: str | None = None
    """The name of another strategy."""
    ckpt_path: str | None = None
    save_as: str | None = None


@dataclass(kw_only=True)
class Report:
    """What a process has after a fit."""

    losses: list[float]
    """Of each step, as logged."""
    metrics: dict[str, float]
    state: dict[str, Tensor]
    """On global rank 0."""


@dataclass
class RecordLosses(Callback):
    losses: list[float] = field(default_factory=list)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def run_fit(fit: Fit, folder: str) -> Report:
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty")
    pl.seed_everything(3, verbose=False)
    data = make_data(fit, Path(folder))
    module = make_module(fit)
    recorder = RecordLosses()
    trainer = pl.Trainer(
        strategy=fit.strategy or make_strategy(fit),
        accelerator="cpu",
        devices=fit.num_stages * fit.num_replicas,
        # What several processes round otherwise, training magnifies; in double precision it stays small.
        precision="64-true",
        max_epochs=fit.max_epochs,
        limit_train_batches=4,
        gradient_clip_val=1.0,
        use_distributed_sampler=fit.distributed_sampler and not fit.replica_order,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    # Strategies of several processes do so at this point, and the plain one does not.
    pl.seed_everything(3, verbose=False)
    trainer.fit(module, datamodule=data, ckpt_path=fit.ckpt_path)
    if fit.save_as is not None:
        trainer.save_checkpoint(fit.save_as)
    # Elsewhere other stages' parameters are placeholders.
    whole = module.state_dict() if trainer.is_global_zero else {}
    return Report(
        losses=recorder.losses,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        state={name: value.detach().clone() for name, value in whole.items()},
    )


def run_fits(fits: list[Fit], folder: str) -> list[Report]:
    """Several fits, one after the other: starting processes costs more than a fit."""
    return [run_fit(fit, folder) for fit in fits]


def make_strategy(fit: Fit) -> AutoPipeStrategy:
    return AutoPipeStrategy(
        num_stages=fit.num_stages,
        num_replicas=fit.num_replicas,
        num_microbatches=fit.num_microbatches // fit.num_replicas,
        timeout=60,
    )


def make_data(fit: Fit, folder: Path) -> pl.LightningDataModule:
    batch_size = fit.batch_size // (2 if fit.replica_order else fit.num_replicas)
    if fit.recipe == "resnet":
        images = DigitsInReplicaOrder if fit.replica_order else DigitsDataModule
        return images(image_size=16, batch_size=batch_size)
    text = MaskedTextInReplicaOrder if fit.replica_order else MaskedTextDataModule
    return text(
        text_file=str(folder / "text.txt"),
        vocab_size=257,
        block_size=13,
        batch_size=batch_size,
        cache_dir=str(folder),
        dynamic_masking=fit.dynamic_masking,
    )


def make_module(fit: Fit) -> pl.LightningModule:
    torch.manual_seed(3)
    if fit.recipe == "resnet":
        return ResNetModule(
            num_classes=10, num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], warmup_steps=2
        )
    return BertModule(
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        vocab_size=257,
        block_size=13,
        dropout=fit.dropout,
        warmup_steps=2,
        config={"initializer_range": 0.1},
    )
