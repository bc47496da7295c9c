"""The few lines that a command ends with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import lightning.pytorch as pl
from rich.console import Console
from rich.markup import escape

from recipes.run import MONITOR, checkpoint_callback, validation_loss, validation_metrics

ACCURACY = "val/accuracy"


def print_training_summary(trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule) -> None:
    """Print the validation loss and what it means, the checkpoint, and how to use it."""
    metrics = validation_metrics(trainer)
    kept = checkpoint_callback(trainer)
    loss = validation_loss(trainer)
    if loss != metrics.get(MONITOR):
        # The kept checkpoint is not the latest one, and only its loss is known.
        metrics = {}
    rows = metric_rows(metrics if loss is None else metrics | {MONITOR: loss}, held_out_entropy(data))
    if kept is not None:
        rows["checkpoint"] = kept.best_model_path
        rows["evaluate it"] = f"python -m recipes.evaluate ckpt_path={kept.best_model_path}"
        rows["load it"] = f"{type(module).__name__}.load_from_checkpoint({kept.best_model_path!r})"
        if kept.last_model_path:
            rows["continue"] = f"the same command with ckpt_path={kept.last_model_path} and more trainer.max_epochs"
    print_rows(f"Trained for {trainer.global_step} steps in {trainer.current_epoch} epochs", rows)


def held_out_entropy(data: pl.LightningDataModule) -> float | None:
    """Give the unigram entropy of the validation text in nats a token; None where the data have no such thing."""
    return getattr(data, "held_out_entropy", None)


def metric_rows(metrics: Mapping[str, float], entropy: float | None) -> dict[str, str]:
    """Give the rows that say how good a model is; loss and entropy are in nats, and only a text has an entropy."""
    rows = {}
    loss, accuracy = metrics.get(MONITOR), metrics.get(ACCURACY)
    if loss is not None:
        unit = "" if entropy is None else f" a token (perplexity {math.exp(loss):.1f})"
        rows["validation loss"] = f"{loss:.6f} nats{unit}"
    if accuracy is not None:
        rows["validation accuracy"] = f"{accuracy:.2%}"
    if entropy is not None:
        rows["unigram entropy"] = f"{entropy:.6f} nats a token, the least that is possible without context"
    if loss is not None and entropy is not None:
        rows["gained from context"] = f"{entropy - loss:.6f} nats a token"
    return rows


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Print names and values under a title; values are not broken, so that they can be copied."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\n[bold]{escape(title)}[/bold]")
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        console.print(f"  [cyan]{name:<{width}}[/cyan]  {escape(value)}")
