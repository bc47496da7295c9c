"""Saving, resuming, and which checkpoints are kept."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_autopipe.checkpoints.consolidation import consolidate
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.conformance.items import Item, make_test
from tests.strategy.modules import (
    InOrder,
    LanguageModule,
    MlpModule,
    quiet_trainer,
    regression_data,
    seeded,
    token_data,
)
from tests.strategy.runs import Fit


def shared_folder(trainer: pl.Trainer) -> Path:
    """A new folder that all ranks see."""
    return Path(trainer.strategy.broadcast(tempfile.mkdtemp() if trainer.is_global_zero else ""))


def plain_values(values: dict[str, Any]) -> dict[str, list[float]]:
    return {name: value.double().flatten().tolist() for name, value in values.items()}


def saved_and_resumed(trainer: Any, module: Any, *, data: Any, resume_with: dict[str, Any]) -> Any:
    """What the file holds, and the parameters after two more epochs of a new module."""
    path = shared_folder(trainer) / "saved.ckpt"
    trainer.save_checkpoint(path)
    strategy: Any = "auto"
    num_replicas, processes = 1, 1
    if isinstance(trainer.strategy, AutoPipeStrategy):
        options = {
            field.name: getattr(trainer.strategy.options, field.name) for field in fields(trainer.strategy.options)
        }
        num_replicas, processes = options["num_replicas"], trainer.world_size
        strategy = AutoPipeStrategy(**{**options, **resume_with})
    resumed = seeded(type(module), optimizer="adamw", lr=0.7)
    again = quiet_trainer(strategy, num_processes=processes, max_epochs=3)
    again.fit(resumed, datamodule=data(num_replicas=num_replicas), ckpt_path=path)
    if not trainer.is_global_zero:
        return None
    file = path
    if path.is_dir():
        file = path.with_name("one.ckpt")
        consolidate(path, file)
    checkpoint = torch.load(file, weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    loaded = type(module).load_from_checkpoint(file, weights_only=True).state_dict()
    found = [
        plain_values(loaded),
        {position: plain_values(state) for position, state in optimizer["state"].items()},
        [group["params"] for group in optimizer["param_groups"]],
        checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"],
        plain_values(dict(resumed.state_dict())),
    ]
    shutil.rmtree(path.parent)
    return found


class KeepsBest(ModelCheckpoint):
    """In a folder of its own."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.dirpath = str(shared_folder(trainer))
        super().setup(trainer, pl_module, stage)


def kept(trainer: Any, module: Any) -> Any:
    """Names of what is kept, which is the best, and what it holds."""
    callback = trainer.checkpoint_callback
    names = sorted(name for name in os.listdir(callback.dirpath))
    best = os.path.basename(callback.best_model_path)
    last = os.path.basename(os.path.realpath(callback.last_model_path))
    losses = trainer.validate(datamodule=trainer.datamodule, ckpt_path="best", verbose=False)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        shutil.rmtree(callback.dirpath)
    return names, best, last, losses


def hpc_resumed(trainer: Any, module: Any) -> Any:
    """The parameters after another epoch of a new module, from the newer one of a scheduler's checkpoints."""
    folder = shared_folder(trainer)
    for version in (1, 2):
        trainer.save_checkpoint(folder / f"hpc_ckpt_{version}.ckpt")
    strategy: Any = "auto"
    if isinstance(trainer.strategy, AutoPipeStrategy):
        options = trainer.strategy.options
        strategy = AutoPipeStrategy(**{field.name: getattr(options, field.name) for field in fields(options)})
    resumed = seeded(MlpModule, lr=0.7)
    again = quiet_trainer(strategy, num_processes=trainer.world_size, max_epochs=2, default_root_dir=str(folder))
    again.fit(resumed, datamodule=trainer.datamodule, ckpt_path="hpc")
    assert again.ckpt_path == str(folder / "hpc_ckpt_2.ckpt")
    if not again.is_global_zero:
        return None
    shutil.rmtree(folder)
    return plain_values(dict(resumed.state_dict()))


class TellsOfException(OnExceptionCheckpoint):
    """Fails on all ranks, and prints what becomes of the checkpoint."""

    def __init__(self) -> None:
        super().__init__(tempfile.gettempdir(), f"exception-{os.getpid()}")

    def on_train_batch_start(self, *_: Any) -> None:
        raise KeyError("of the user's")

    def on_exception(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            super().on_exception(trainer)
        path = Path(self.ckpt_path)
        print(*(warning.message for warning in told), "It was written" if path.exists() else "")
        path.unlink(missing_ok=True)


def kept_item(**options: Any) -> Item:
    return Item(
        fit=Fit(
            module_class=MlpModule,
            data=partial(InOrder, regression_data(24), regression_data(8, seed=1), batch_size=8),
            trainer_options={"max_epochs": 3, "enable_checkpointing": True},
            callbacks=[partial(KeepsBest, filename="{epoch}-{step}", **options)],
            after=kept,
        ),
        tolerance=1e-9,
    )


def resumed_item(file_format: str, *, data: Any, module_class: Any = MlpModule, **changes: Any) -> Item:
    resume_with = changes.pop("resume_with", {})
    return Item(
        fit=Fit(
            module_class=module_class,
            module_options={"optimizer": "adamw", "lr": 0.01},
            data=data,
            strategy_options={"checkpoint_format": file_format, **changes},
            after=partial(saved_and_resumed, data=data, resume_with=resume_with),
        ),
        # Where a loaded module is float32.
        tolerance=1e-6,
    )


def keeping_item(file_format: str) -> Item:
    return Item(
        fit=Fit(
            module_class=MlpModule,
            module_options={"optimizer": "adamw", "lr": 0.02},
            data=partial(InOrder, regression_data(16), regression_data(8, seed=1), batch_size=8),
            strategy_options={"checkpoint_format": file_format},
            trainer_options={"max_epochs": 5, "enable_checkpointing": True},
            callbacks=[partial(KeepsBest, monitor="val_loss", save_top_k=2, save_last="link", filename="{epoch}")],
            after=kept,
        ),
        tolerance=1e-9,
    )


TOKENS = partial(InOrder, token_data(16), batch_size=8)
NUMBERS = partial(InOrder, regression_data(16), batch_size=8)

ITEMS = {
    "checkpoints: one file, resumed": resumed_item("consolidated", data=NUMBERS),
    "checkpoints: a sharded folder, resumed": resumed_item("sharded", data=TOKENS, module_class=LanguageModule),
    "checkpoints: sharded in the background, resumed": resumed_item("sharded_async", data=NUMBERS),
    "checkpoints: one file of shared optimizer state, resumed without sharing": resumed_item(
        "consolidated",
        data=TOKENS,
        module_class=LanguageModule,
        shard_optimizer=True,
        resume_with={"shard_optimizer": False},
    ),
    "checkpoints: a folder of shared optimizer state, resumed by another schedule": resumed_item(
        "sharded", data=NUMBERS, shard_optimizer=True, resume_with={"schedule": "zero_bubble"}
    ),
    "checkpoints: the best and the last are kept, as files": keeping_item("consolidated"),
    "checkpoints: the best and the last are kept, as folders": keeping_item("sharded"),
    "checkpoints: the best and the last are kept, written in the background": keeping_item("sharded_async"),
    "checkpoints: save_on_train_epoch_end, by a value of the epoch": kept_item(
        save_on_train_epoch_end=True, monitor="train_loss_epoch", save_top_k=2, save_last=True
    ),
    "checkpoints: train_time_interval, behind every batch": kept_item(
        train_time_interval=timedelta(microseconds=1), save_top_k=-1
    ),
    "checkpoints: ckpt_path='hpc'": Item(fit=Fit(module_class=MlpModule, data=NUMBERS, after=hpc_resumed)),
    "checkpoints: ckpt_path='registry'": Item(
        fit=Fit(module_class=MlpModule, data=NUMBERS, ckpt_path="registry"), refused="registry"
    ),
    "checkpoints: OnExceptionCheckpoint, where rank 0 has all or not": Item(
        fit=Fit(
            module_class=MlpModule,
            data=NUMBERS,
            callbacks=[TellsOfException],
            trainer_options={"enable_checkpointing": True},
        ),
        refused=r"It was written|no checkpoint is written to .* Resume from the last regular checkpoint",
    ),
}

test_item = make_test(ITEMS)
