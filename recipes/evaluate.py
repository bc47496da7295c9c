"""Validate a checkpoint in one process: ``python -m recipes.evaluate ckpt_path=logs/demo/checkpoints/best.ckpt``.

The checkpoint is loaded into the plain LightningModule, with ``load_from_checkpoint`` and nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from hydra.utils import get_class, instantiate, to_absolute_path
from omegaconf import DictConfig, OmegaConf

from recipes.classes import DATA, MODEL, recorded_class
from recipes.launch import CONFIG_DIR, hush_lightning, other_rank_overrides
from recipes.run import MONITOR, recorded_loss, strategy_from
from recipes.summary import ACCURACY, held_out_entropy, metric_rows, print_rows


def evaluate(cfg: DictConfig) -> float:
    """Give the validation loss of the checkpoint, after printing it beside the one that training recorded.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        SystemExit: The loss is not what ``require`` asks for.
    """
    path = Path(to_absolute_path(cfg.ckpt_path))
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path} (ckpt_path).")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    module = _load(cfg.model, path, checkpoint, MODEL, pl.LightningModule)
    data = _load(cfg.data, path, checkpoint, DATA, pl.LightningDataModule)
    trainer: pl.Trainer = instantiate(
        cfg.trainer, strategy=strategy_from(cfg.strategy), logger=False, enable_checkpointing=False, _convert_="all"
    )
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    loss = float(metrics[MONITOR])

    recorded = recorded_loss(checkpoint)
    entropy = held_out_entropy(data)
    if trainer.is_global_zero:
        rows = metric_rows(metrics, entropy)
        if recorded is not None:
            rows["recorded in training"] = f"{recorded:.6f} nats (difference {abs(loss - recorded):.1e})"
        print_rows(f"Checkpoint {path}, {trainer.world_size} process{'es' * (trainer.world_size > 1)}", rows)
    _require(cfg.require, loss, metrics.get(ACCURACY), recorded, entropy)
    return loss


def _load(node: DictConfig, path: Path, checkpoint: dict[str, Any], kind: str, base: type) -> Any:
    settings: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    name = settings.pop("_target_")
    target: Any = recorded_class(checkpoint, kind, base) if name is None else get_class(name)
    return target.load_from_checkpoint(path, map_location="cpu", weights_only=True, **settings)


def _require(
    require: DictConfig, loss: float, accuracy: float | None, recorded: float | None, entropy: float | None
) -> None:
    shortfalls = []
    if require.max_difference is not None:
        if recorded is None:
            shortfalls.append("the checkpoint records no validation loss to compare with")
        elif not abs(loss - recorded) <= require.max_difference:
            shortfalls.append(
                f"validation loss {loss:.6f} differs from the recorded {recorded:.6f} by {abs(loss - recorded):.2e}, "
                f"more than {require.max_difference:.0e}"
            )
    if require.min_below_entropy is not None:
        if entropy is None:
            shortfalls.append("the data have no unigram entropy to compare with")
        elif not entropy - loss >= require.min_below_entropy:
            shortfalls.append(
                f"validation loss {loss:.4f} is {entropy - loss:.4f} nats below the unigram entropy {entropy:.4f}, "
                f"less than {require.min_below_entropy}"
            )
    if require.min_accuracy is not None:
        if accuracy is None:
            shortfalls.append(f"validation logs no {ACCURACY} to compare with")
        elif not accuracy >= require.min_accuracy:
            shortfalls.append(f"validation accuracy {accuracy:.4f} is less than {require.min_accuracy}")
    if shortfalls:
        sys.exit("Fell short: " + "; ".join(shortfalls))


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="evaluate")
def main(cfg: DictConfig) -> float:
    return evaluate(cfg)


if __name__ == "__main__":
    hush_lightning()
    sys.argv += other_rank_overrides()
    main()
