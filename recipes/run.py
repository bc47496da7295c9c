"""From config nodes to what a Trainer takes, and back to the figure that counts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

MONITOR = "val/loss"


def strategy_from(node: DictConfig) -> Strategy | str:
    """Give the strategy object that the node describes, or the name that it holds."""
    if "_target_" in node:
        strategy: Strategy = instantiate(node, _convert_="all")
        return strategy
    name: str = node["name"]
    return name


def callbacks_from(node: DictConfig | None) -> list[Callback]:
    """Give the callbacks of a node of named callbacks; one that is set to null is left out."""
    return [instantiate(callback, _convert_="all") for callback in (node or {}).values() if callback is not None]


def loggers_from(node: DictConfig | None) -> list[Logger]:
    """Give the loggers of a node of named loggers; one that is set to null is left out."""
    return [instantiate(logger, _convert_="all") for logger in (node or {}).values() if logger is not None]


def checkpoint_callback(trainer: pl.Trainer) -> ModelCheckpoint | None:
    """Give the callback that kept the checkpoint with the smallest validation loss, where there is one."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor == MONITOR and callback.best_model_path:
            return callback
    return None


def validation_loss(trainer: pl.Trainer) -> float | None:
    """Give the validation loss of the kept checkpoint, else the latest one; None where nothing was validated."""
    kept = checkpoint_callback(trainer)
    loss = trainer.callback_metrics.get(MONITOR) if kept is None else kept.best_model_score
    return None if loss is None else float(loss)


def validation_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Give what the latest validation logged, by name."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}


def recorded_loss(checkpoint: dict[str, Any]) -> float | None:
    """Give the validation loss that was measured when a checkpoint was written; None where it holds none."""
    for state in checkpoint.get("callbacks", {}).values():
        if state.get("monitor") == MONITOR and state.get("current_score") is not None:
            return float(state["current_score"])
    return None
