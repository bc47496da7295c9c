"""Hooks of modules, data modules and callbacks: on every rank as often, and in the order, as on one device."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.conformance.items import Item, make_test
from tests.strategy.modules import InOrder, MlpModule, in_order, regression_data
from tests.strategy.runs import Fit, Report

NOTES: list[tuple[Any, ...]] = []
"""What was called in this process since the last module was made."""
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of a batch are called where it is read: by the first stage."""
EARLY = ("data.train_dataloader",)
"""Called once, but before a sanity check: the plan is made from a training batch."""
MODULE_HOOKS = (
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)


def hooks_of(*kinds: type) -> list[str]:
    return [name for kind in kinds for name, hook in vars(kind).items() if inspect.isfunction(hook) and name[0] != "_"]


def noting(owner: str, *names: str) -> Callable[[type], type]:
    """Overrides hooks of a class by themselves, noted with their plain arguments."""

    def override(kind: type, name: str) -> None:
        hook = getattr(kind, name)

        @functools.wraps(hook)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = (*args, *kwargs.values())
            plain = tuple(value for value in arguments if value is None or isinstance(value, (int, str)))
            NOTES.append((f"{owner}.{name}", *plain))
            return hook(self, *args, **kwargs)

        setattr(kind, name, noted)

    def decorate(kind: type) -> type:
        for name in names:
            override(kind, name)
        return kind

    return decorate


@noting(
    "module", *hooks_of(ModelHooks, CheckpointHooks), *TRANSFERS, "prepare_data", "setup", "teardown", *MODULE_HOOKS
)
class NotingModule(MlpModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, depth=2)
        NOTES.clear()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


@noting("data", *(set(hooks_of(DataHooks)) - set(TRANSFERS)), "state_dict", "load_state_dict")
class NotingData(InOrder):
    def predict_dataloader(self) -> Any:
        return in_order(self.trainer.lightning_module, self.val, self.val_batch_size)  # type: ignore[union-attr, arg-type]


@noting("callback", *hooks_of(pl.Callback))
class NotingCallback(pl.Callback):
    pass


def notes_of_all(trainer: Any, module: Any) -> Any:
    """Of a fit, a validation, a test of a checkpoint and a prediction; and whether this rank reads batches."""
    data = trainer.datamodule
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, ckpt_path="best", verbose=False)
    trainer.predict(module, datamodule=data)
    strategy = trainer.strategy
    reads = not isinstance(strategy, AutoPipeStrategy) or strategy.communicator.is_first_stage
    return list(NOTES), reads


def same_hooks(plain: Report, ranks: list[Report]) -> None:
    expected, _ = plain.after
    assert len(expected) > 300
    for global_rank, rank in enumerate(ranks):
        notes, reads = rank.after
        lines = [comparable(some, reads) for some in (expected, notes)]
        difference = list(difflib.unified_diff(*lines, "one device", f"rank {global_rank}"))
        assert not difference, "\n".join(difference)
        assert notes.count(EARLY) == expected.count(EARLY)


def comparable(notes: list[tuple[Any, ...]], reads: bool) -> list[str]:
    """Without what a plan needs before the first step: the training loader, and once more the transfer of a batch."""
    begin = notes.index(("callback.on_sanity_check_end",))
    return [
        str(note)
        for index, note in enumerate(notes)
        if note != EARLY and (not note[0].endswith(TRANSFERS) or (reads and index > begin))
    ]


FOLDER = Path(tempfile.gettempdir()) / f"lightning-autopipe-{os.getpid()}"

ITEMS = {
    "hooks of module, data module and callbacks, in fit, validate, test and predict": Item(
        fit=Fit(
            module_class=NotingModule,
            data=partial(NotingData, regression_data(16), regression_data(8, seed=1), batch_size=4),
            callbacks=(NotingCallback, partial(ModelCheckpoint, FOLDER, monitor="val_loss", save_last=True)),
            trainer_options={
                "enable_checkpointing": True,
                "num_sanity_val_steps": 1,
                "max_epochs": 2,
                "accumulate_grad_batches": 2,
                "gradient_clip_val": 0.1,
                "val_check_interval": 2,
            },
            after=notes_of_all,
        ),
        check=same_hooks,
        is_same=False,
    ),
}

test_item = make_test(ITEMS)
