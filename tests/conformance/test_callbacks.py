"""Callbacks of Lightning's, and how a user's own are used."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn

from tests.conformance.items import Item, make_test
from tests.conformance.test_logging import Memory, written
from tests.strategy.configured_modules import ConfiguredModule
from tests.strategy.modules import WIDTH, InOrder, LanguageModule, MlpModule, regression_data, token_data
from tests.strategy.runs import Fit

DATA = partial(InOrder, regression_data(32), regression_data(8, seed=1), batch_size=8, val_batch_size=4)
FOLDER = f"{tempfile.gettempdir()}/autopipe-conformance-{os.getuid()}"
TOKENS = partial(InOrder, token_data(16), token_data(8, seed=1), batch_size=8)


class SchedulingModule(MlpModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class FinetunedModule(MlpModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone = self.blocks


def checkpoints(name: str, **options: Any) -> Callable[[], Any]:
    """Makes a ModelCheckpoint with a folder of its own, the same in all processes."""
    return partial(ModelCheckpoint, dirpath=f"{FOLDER}/{name}", enable_version_counter=False, **options)


def kept_checkpoints(trainer: Any, module: Any) -> Any:
    """What was kept and why, alike on all ranks."""
    callback = trainer.checkpoint_callback
    scores = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    names = sorted(path.name for path in Path(callback.dirpath).iterdir())
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        shutil.rmtree(callback.dirpath)
    trainer.strategy.barrier()
    return scores, names, Path(callback.best_model_path).name, Path(callback.last_model_path).name


def saved_and_resumed(trainer: Any, module: Any, *, look: Callable[[Any], Any], num_epochs: int) -> Any:
    """What `look` finds in a checkpoint, and where training of so many more epochs goes on from it."""
    own_folder = tempfile.mkdtemp()
    path = Path(trainer.strategy.broadcast(own_folder)) / "saved.ckpt"
    trainer.save_checkpoint(path)
    found = look(torch.load(path, weights_only=True)) if trainer.is_global_zero else None
    trainer.fit_loop.max_epochs += num_epochs
    trainer.fit(module, datamodule=trainer.datamodule, ckpt_path=path)
    trainer.strategy.barrier()
    shutil.rmtree(own_folder)
    if not trainer.is_global_zero:
        return None
    return found, {name: float(p.detach().sum()) for name, p in module.named_parameters()}


def averages_in(checkpoint: Any) -> Any:
    states = [checkpoint["state_dict"], checkpoint.get("current_model_state", {})]
    states += [state.get("average_model_state") or {} for state in checkpoint["callbacks"].values()]
    return [{name: float(value.double().sum()) for name, value in state.items()} for state in states]


def groups_in(checkpoint: Any) -> Any:
    (state,) = checkpoint["optimizer_states"]
    (finetuning,) = (s for s in checkpoint["callbacks"].values() if "internal_optimizer_metadata" in s)
    averages = {position: float(s["exp_avg"].sum()) for position, s in state["state"].items()}
    return state["param_groups"], averages, finetuning["internal_optimizer_metadata"]


def zeros_in(checkpoint: Any) -> Any:
    return {name: int((value == 0).sum()) for name, value in sorted(checkpoint["state_dict"].items())}


class SavingInEpoch(pl.Callback):
    """Saves after some steps: where masks are older than the last step, and before the next ones."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.found.append(saved(trainer, zeros_in))


def saved(trainer: Any, look: Callable[[Any], Any]) -> Any:
    """What `look` finds in a checkpoint."""
    own_folder = tempfile.mkdtemp()
    path = Path(trainer.strategy.broadcast(own_folder)) / "saved.ckpt"
    trainer.save_checkpoint(path)
    found = look(torch.load(path, weights_only=True)) if trainer.is_global_zero else None
    trainer.strategy.barrier()
    shutil.rmtree(own_folder)
    return found


def saved_zeros(trainer: Any, module: Any) -> Any:
    (callback,) = (c for c in trainer.callbacks if isinstance(c, SavingInEpoch))
    found = [*callback.found, saved(trainer, zeros_in)]
    return found if trainer.is_global_zero else None


saved_average = partial(saved_and_resumed, look=averages_in, num_epochs=1)
saved_pruning = partial(saved_and_resumed, look=zeros_in, num_epochs=2)
saved_groups = partial(saved_and_resumed, look=groups_in, num_epochs=2)


def averaging(kind: type[pl.Callback], **options: Any) -> Callable[[], pl.Callback]:
    return partial(kind, **options)


class EveryOtherStep(WeightAveraging):
    """The mean over every other step, from the third on: validation before sees the first values."""

    def __init__(self) -> None:
        super().__init__(use_buffers=False)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 2 and step_idx % 2 == 0


class NormModule(MlpModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


class FinetunedHead(FinetunedModule):
    """The optimizer has the head alone until the backbone is unfrozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


FINETUNING = Fit(
    module_class=FinetunedHead,
    data=DATA,
    callbacks=(partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, verbose=False),),
    trainer_options={"max_epochs": 2, "num_sanity_val_steps": 1},
    after=saved_groups,
)


def found_rate(trainer: Any, module: Any) -> Any:
    finder = next(callback for callback in trainer.callbacks if isinstance(callback, LearningRateFinder))
    return finder.optimal_lr.results, module.lr


def tuned(trainer: Any, module: Any) -> Any:
    """What the Tuner finds in a fit of its own, and the fit after it."""
    trainer.fit_loop.max_epochs += 1
    finder = Tuner(trainer).lr_find(module, datamodule=trainer.datamodule, num_training=5, early_stop_threshold=None)
    trainer.fit(module, datamodule=trainer.datamodule)
    assert finder is not None
    values = {name: float(p.detach().sum()) for name, p in module.named_parameters()} if trainer.is_global_zero else 0
    return (finder.results, values) if trainer.is_global_zero else None


class ExampleModule(MlpModule):
    """Has an input for its summary."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.example_input_array = torch.zeros(2, WIDTH, dtype=torch.float64)


class TextOfSummary(pl.Callback):
    """The summary's text before the fit, with the sizes of inputs and outputs."""

    text = ""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.text = str(pl.utilities.model_summary.ModelSummary(module, max_depth=-1))


def text_of_summary(trainer: Any, module: Any) -> str:
    text = next(callback.text for callback in trainer.callbacks if isinstance(callback, TextOfSummary))
    assert f"[2, {WIDTH}]" in text
    return text


class TotalsOfSummary(pl.Callback):
    """What a summary says before the fit, in the middle of it and after it."""

    def __init__(self) -> None:
        self.totals: list[Any] = []

    def note(self, module: Any) -> None:
        summary = pl.utilities.model_summary.ModelSummary(module, max_depth=-1)
        self.totals.append((summary.total_parameters, summary.trainable_parameters, summary.param_nums))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.note(module)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.note(module)


def totals(trainer: Any, module: Any) -> Any:
    callback = next(callback for callback in trainer.callbacks if isinstance(callback, TotalsOfSummary))
    callback.note(module)
    return callback.totals


class Order(pl.Callback):
    """In which order its hooks are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            self.calls.append(name)
        return super().__getattribute__(name)


def calls(trainer: Any, module: Any) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, Order)).calls


ITEMS = {
    "ModelCheckpoint: the best two, and the last": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(
                checkpoints(
                    "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.6f}"
                ),
            ),
            trainer_options={"max_epochs": 4, "enable_checkpointing": True},
            after=kept_checkpoints,
        )
    ),
    "ModelCheckpoint: every_n_train_steps by a value of the step": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(
                checkpoints(
                    "steps",
                    monitor="train_loss_step",
                    save_top_k=2,
                    every_n_train_steps=2,
                    filename="{step}",
                    mode="max",
                ),
            ),
            trainer_options={"max_epochs": 2, "enable_checkpointing": True},
            after=kept_checkpoints,
        )
    ),
    "EarlyStopping, LearningRateMonitor, DeviceStatsMonitor, progress bar": Item(
        fit=Fit(
            module_class=SchedulingModule,
            data=DATA,
            logger=Memory,
            callbacks=(
                partial(EarlyStopping, monitor="train_loss_epoch", mode="max", patience=1),
                partial(LearningRateMonitor, logging_interval="step"),
                TQDMProgressBar,
            ),
            trainer_options={"max_epochs": 6, "log_every_n_steps": 1, "enable_progress_bar": True},
            after=written,
        )
    ),
    "RichProgressBar, RichModelSummary, DeviceStatsMonitor": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            logger=Memory,
            callbacks=(RichProgressBar, RichModelSummary, partial(DeviceStatsMonitor, cpu_stats=False)),
            trainer_options={"enable_progress_bar": True, "enable_model_summary": True},
        )
    ),
    "ModelSummary: totals of the whole module": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(TotalsOfSummary, partial(ModelSummary, max_depth=2)),
            trainer_options={"enable_model_summary": True},
            after=totals,
        )
    ),
    "ModelSummary: example_input_array, max_depth=-1": Item(
        fit=Fit(
            module_class=ExampleModule,
            data=DATA,
            callbacks=(TextOfSummary, partial(ModelSummary, max_depth=-1)),
            trainer_options={"enable_model_summary": True},
            after=text_of_summary,
        )
    ),
    "BackboneFinetuning": Item(
        fit=Fit(
            module_class=FinetunedModule,
            data=DATA,
            callbacks=(partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, verbose=False),),
            trainer_options={"max_epochs": 3},
        )
    ),
    "BackboneFinetuning: checkpoint, resume": Item(fit=FINETUNING),
    "BackboneFinetuning: checkpoint, resume, shard_optimizer": Item(
        fit=replace(FINETUNING, strategy_options={"shard_optimizer": True})
    ),
    "EMAWeightAveraging: validation, checkpoint, resume": Item(
        fit=Fit(
            module_class=LanguageModule,
            module_options={"optimizer": "adamw", "lr": 0.01},
            data=TOKENS,
            callbacks=(averaging(EMAWeightAveraging, decay=0.7),),
            trainer_options={"max_epochs": 2, "num_sanity_val_steps": 1},
            after=saved_average,
        )
    ),
    "EMAWeightAveraging: of a module built in configure_model": Item(
        fit=Fit(
            module_class=ConfiguredModule,
            module_options={"optimizer": "adamw"},
            data=DATA,
            callbacks=(averaging(EMAWeightAveraging, decay=0.7),),
            trainer_options={"max_epochs": 2, "num_sanity_val_steps": 1},
            after=saved_average,
        ),
        tolerance=1e-6,  # Lightning makes the average in float32 there
    ),
    "WeightAveraging: every other step": Item(
        fit=Fit(
            module_class=NormModule,
            data=DATA,
            callbacks=(EveryOtherStep,),
            trainer_options={"max_epochs": 2, "val_check_interval": 1},
            after=saved_average,
        )
    ),
    "StochasticWeightAveraging: schedule, checkpoint, resume": Item(
        fit=Fit(
            module_class=SchedulingModule,
            data=DATA,
            callbacks=(averaging(StochasticWeightAveraging, swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1),),
            trainer_options={"max_epochs": 4},
            after=saved_average,
        )
    ),
    "LearningRateFinder": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(partial(LearningRateFinder, num_training_steps=6, early_stop_threshold=None),),
            trainer_options={"max_epochs": 2, "default_root_dir": FOLDER},
            after=found_rate,
        )
    ),
    "Tuner.lr_find": Item(fit=Fit(module_class=MlpModule, data=DATA, after=tuned)),
    "order of hooks": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(Order,),
            trainer_options={"num_sanity_val_steps": 1, "accumulate_grad_batches": 2},
            after=calls,
        )
    ),
    "BatchSizeFinder": Item(
        fit=Fit(module_class=MlpModule, data=DATA, callbacks=(BatchSizeFinder,)),
        refused=r"stages run out at different sizes\. Remove it",
    ),
    "ModelPruning: over all parameters, lottery tickets": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(partial(ModelPruning, "l1_unstructured", amount=0.3), SavingInEpoch),
            trainer_options={"max_epochs": 3},
            after=saved_zeros,
        )
    ),
    "ModelPruning: layer by layer, resumed": Item(
        fit=Fit(
            module_class=FinetunedModule,
            data=DATA,
            callbacks=(
                partial(
                    ModelPruning,
                    "ln_structured",
                    amount=0.4,
                    pruning_dim=0,
                    pruning_norm=2,
                    parameter_names=["weight"],
                    use_global_unstructured=False,
                    use_lottery_ticket_hypothesis=False,
                    prune_on_train_epoch_end=False,
                ),
            ),
            trainer_options={"max_epochs": 2, "val_check_interval": 2},
            after=saved_pruning,
        )
    ),
    "ModelPruning: masks kept": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(
                partial(
                    ModelPruning,
                    "l1_unstructured",
                    amount=4,
                    parameter_names=["weight"],
                    make_pruning_permanent=False,
                    use_lottery_ticket_hypothesis=False,
                ),
                SavingInEpoch,
            ),
            trainer_options={"max_epochs": 2},
            after=saved_zeros,
        )
    ),
}

test_item = make_test(ITEMS)
