"""The few lines that a command ends with."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from rich.console import Console
from rich.markup import escape

from recipes.run import checkpoint_callback, validation_loss


def print_training_summary(trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule) -> None:
    """Print the validation loss beside the unigram entropy, the checkpoint, and how to use it."""
    rows = loss_rows(validation_loss(trainer), held_out_entropy(data))
    kept = checkpoint_callback(trainer)
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


def loss_rows(loss: float | None, entropy: float | None) -> dict[str, str]:
    """Give the rows that say how good a loss is; both are in nats a token."""
    rows = {}
    if loss is not None:
        rows["validation loss"] = f"{loss:.6f} nats a token (perplexity {math.exp(loss):.1f})"
    if entropy is not None:
        rows["unigram entropy"] = f"{entropy:.6f} nats a token, the least that is possible without context"
    if loss is not None and entropy is not None:
        rows["gained from context"] = f"{entropy - loss:.6f} nats a token"
    return rows


def print_rows(title: str, rows: dict[str, str]) -> None:
    """Print names and values under a title; values are not broken, so that they can be copied."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\n[bold]{escape(title)}[/bold]")
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        console.print(f"  [cyan]{name:<{width}}[/cyan]  {escape(value)}")
