"""Train a recipe: ``python -m recipes.train recipe=gpt2 strategy.num_stages=2 trainer.devices=2``.

A sweep is several jobs one after another: ``python -m recipes.train --multirun strategy.num_microbatches=2,4,8``. The
settings are in ``configs/train.yaml`` and the folders beside it.
"""

from __future__ import annotations

import sys

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.launch import CONFIG_DIR, hush_lightning, other_rank_overrides
from recipes.sweep import needs_own_process, report_result, run_in_own_process


def train(cfg: DictConfig) -> float | None:
    """Run ``fit`` as the config says, print how it went, and give the smallest validation loss (None without one)."""
    # Not above: a process that runs a sweep only starts the jobs, and need not import Lightning and torch.
    import lightning.pytorch as pl

    from recipes.classes import RecordClasses
    from recipes.run import callbacks_from, loggers_from, strategy_from, validation_loss
    from recipes.summary import print_training_summary

    pl.seed_everything(cfg.seed, workers=True, verbose=False)

    data: pl.LightningDataModule = instantiate(cfg.data, _convert_="all")
    module: pl.LightningModule = instantiate(cfg.model, _convert_="all")
    trainer: pl.Trainer = instantiate(
        cfg.trainer,
        strategy=strategy_from(cfg.strategy),
        callbacks=[*callbacks_from(cfg.get("callbacks")), RecordClasses(module, data)],
        logger=loggers_from(cfg.get("logger")),
        _convert_="all",
    )

    trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path)

    if trainer.is_global_zero and not cfg.trainer.get("fast_dev_run"):
        print_training_summary(trainer, module, data)
    return validation_loss(trainer)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train")
def main(cfg: DictConfig) -> float | None:
    if needs_own_process():
        return run_in_own_process("recipes.train")
    loss = train(cfg)
    report_result(loss)
    return loss


if __name__ == "__main__":
    hush_lightning()
    sys.argv += other_rank_overrides()
    main()
