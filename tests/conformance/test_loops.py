"""The Trainer's loops and flags, and what is done after a fit."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader, IterableDataset

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.conformance.items import Item, make_test
from tests.strategy.modules import CombinedData, InOrder, MixedModule, MlpModule, in_order, numbers, regression_data
from tests.strategy.runs import Fit

DATA = partial(InOrder, regression_data(32), regression_data(10, seed=1), batch_size=8, val_batch_size=4)

PROFILES = Path(tempfile.gettempdir()) / f"autopipe-profiles-{os.getuid()}"


def progress(trainer: Any, module: Any) -> Any:
    """How far the loops have come."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    return trainer.global_step, trainer.current_epoch, val_loop.batch_progress.total.completed


def has_exported(trainer: Any, module: Any) -> bool:
    """Whether this process has written what its profiler saw; it is removed."""
    rank = "" if trainer.world_size == 1 else f"-{trainer.global_rank}"
    exported = list(PROFILES.glob(f"fit{rank}-[[]*.json"))
    for file in exported:
        file.unlink()
    return len(exported) > 0


class SeveralLoaders(InOrder):
    def val_dataloader(self) -> Any:
        module = self.trainer.lightning_module
        return [in_order(module, regression_data(n, seed=n), self.val_batch_size) for n in (12, 6)]


class SeveralLoadersModule(MlpModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("val_loss", loss)
        self.log("all", loss, add_dataloader_idx=dataloader_idx == 1)


class Stream(IterableDataset[Any]):
    """Deals its samples to replicas by itself."""

    def __init__(self, num_samples: int, share: dict[str, int]) -> None:
        self.data = list(regression_data(num_samples))[share["rank"] :: share["num_replicas"]]

    def __iter__(self) -> Any:
        return iter(self.data)


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return len(self.data)


class StreamData(InOrder):
    stream: type[Stream] = Stream

    def train_dataloader(self) -> Any:
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(self.stream(24, share), batch_size=self.batch_size)


class StreamWithLengthData(StreamData):
    stream = StreamWithLength


class CountedData(InOrder):
    """Counts its own hooks, and has a state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.trainer.current_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(f"load {state_dict['epoch']}")

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return super().train_dataloader()


def calls_of_data(trainer: Any, module: Any) -> Any:
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    return trainer.datamodule.calls


class PreparedData(InOrder):
    """Counts how often it is prepared and set up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_prepared = self.num_set_up = 0

    def prepare_data(self) -> None:
        self.num_prepared += 1

    def setup(self, stage: str) -> None:
        assert isinstance(self.trainer.datamodule, PreparedData)  # type: ignore[union-attr]
        self.num_set_up += 1


def prepared(trainer: Any, module: Any) -> Any:
    """By all processes of a node together, and by each."""
    counts = trainer.datamodule.num_prepared, trainer.datamodule.num_set_up
    strategy = trainer.strategy
    found = strategy.communicator.gather_in_world(counts) if isinstance(strategy, AutoPipeStrategy) else [counts]
    return sum(num_prepared for num_prepared, _ in found), {num_set_up for _, num_set_up in found}


class SkippingModule(MlpModule):
    """Ends its second epoch before the third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None


class StopsOnOneRank(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == trainer.world_size - 1:
            trainer.should_stop = True


class FastClock(Timer):
    """Time is up after the third step, by the clock of rank 0; others go otherwise."""

    def __init__(self) -> None:
        super().__init__(timedelta(seconds=10))

    def time_elapsed(self, stage: Any = "train") -> float:
        trainer = self._trainer
        return 60.0 if trainer.global_rank == 0 and trainer.global_step >= 3 else 0.0

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._trainer = trainer
        super().setup(trainer, *args, **kwargs)


def run_all(trainer: Any, module: Any) -> Any:
    """All other runs, in the same Trainer."""
    data = trainer.datamodule
    validated = trainer.validate(module, datamodule=data, verbose=False)
    tested = trainer.test(module, datamodule=data, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data)
    return validated, tested, numbers(trainer.callback_metrics), trainer.global_step


def fit_another(trainer: Any, module: Any) -> Any:
    """Another module, of another depth, in the same Trainer."""
    torch.manual_seed(11)
    other = MlpModule(depth=5).double()
    trainer.fit_loop.max_epochs += 1
    trainer.fit(other, datamodule=trainer.datamodule)
    found = float(other.head.weight.detach().sum()) if trainer.is_global_zero else None
    again = trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    return None if found is None else (found, numbers(trainer.callback_metrics), again)


def no_predictions(trainer: Any, module: Any) -> Any:
    inputs = DataLoader(regression_data(10, seed=2).tensors[0], batch_size=2)
    return trainer.predict(module, inputs, return_predictions=False)


ITEMS = {
    "loops: limits, every second epoch validated": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={
                "limit_train_batches": 3,
                "limit_val_batches": 0.5,
                "limit_test_batches": 1,
                "check_val_every_n_epoch": 2,
                "max_epochs": 3,
                "log_every_n_steps": 1,
            },
            after=run_all,
        )
    ),
    "loops: overfit_batches": Item(
        fit=Fit(
            module_class=MlpModule, data=DATA, trainer_options={"overfit_batches": 2, "max_epochs": 2}, after=progress
        )
    ),
    "loops: val_check_interval, batches over epochs": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2},
            after=progress,
        )
    ),
    "loops: val_check_interval by time": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={"val_check_interval": timedelta(microseconds=1), "num_sanity_val_steps": 1},
            after=progress,
        )
    ),
    "loops: fast_dev_run": Item(
        fit=Fit(module_class=MlpModule, data=DATA, trainer_options={"fast_dev_run": 2}, after=progress)
    ),
    "loops: max_steps and min_epochs": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={"max_steps": 6, "max_epochs": -1, "min_epochs": 1},
            after=progress,
        )
    ),
    "loops: max_time": Item(fit=Fit(module_class=MlpModule, data=DATA, callbacks=(FastClock,), after=progress)),
    "loops: on_train_batch_start gives -1": Item(
        fit=Fit(module_class=SkippingModule, data=DATA, trainer_options={"max_epochs": 3}, after=progress)
    ),
    "loops: should_stop on one rank": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            callbacks=(StopsOnOneRank,),
            trainer_options={"max_epochs": 5},
            after=progress,
        )
    ),
    "loops: several validation loaders": Item(
        fit=Fit(
            module_class=SeveralLoadersModule,
            data=partial(SeveralLoaders, regression_data(16), batch_size=8, val_batch_size=4),
            trainer_options={"num_sanity_val_steps": 1},
        )
    ),
    "loops: CombinedLoader": Item(
        fit=Fit(module_class=MixedModule, data=partial(CombinedData, regression_data(16), batch_size=4))
    ),
    "loops: IterableDataset": Item(
        fit=Fit(module_class=MlpModule, data=partial(StreamData, batch_size=8), after=progress)
    ),
    "loops: IterableDataset with a length": Item(
        fit=Fit(module_class=MlpModule, data=partial(StreamWithLengthData, batch_size=8), after=progress)
    ),
    "loops: hooks of a datamodule, reloaded every epoch": Item(
        fit=Fit(
            module_class=MlpModule,
            data=partial(CountedData, regression_data(16), regression_data(8, seed=1), batch_size=8),
            trainer_options={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
            after=calls_of_data,
        )
    ),
    "flags: profiler, detect_anomaly, deterministic, benchmark, inference_mode": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={
                "profiler": "simple",
                "detect_anomaly": True,
                "deterministic": True,
                "benchmark": False,
                "inference_mode": False,
                "use_distributed_sampler": False,
            },
        )
    ),
    "loops: prepare_data once a node, setup in each process": Item(
        fit=Fit(module_class=MlpModule, data=partial(PreparedData, regression_data(16), batch_size=8), after=prepared)
    ),
    "flags: profiler=pytorch": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={"profiler": "pytorch", "max_steps": 1, "default_root_dir": PROFILES},
            after=has_exported,
        )
    ),
    "flags: profiler=advanced": Item(
        fit=Fit(module_class=MlpModule, data=DATA, trainer_options={"profiler": "advanced", "max_steps": 1})
    ),
    "flags: barebones": Item(
        fit=Fit(
            module_class=MlpModule,
            data=DATA,
            trainer_options={
                "barebones": True,
                "num_sanity_val_steps": None,
                "logger": None,
                "enable_checkpointing": None,
                "enable_progress_bar": None,
                "enable_model_summary": None,
            },
        )
    ),
    "runs: fit, validate, test, fit": Item(fit=Fit(module_class=MlpModule, data=DATA, after=run_all)),
    "runs: fit of another module, and back": Item(fit=Fit(module_class=MlpModule, data=DATA, after=fit_another)),
    "runs: predict without return": Item(fit=Fit(module_class=MlpModule, data=DATA, after=no_predictions)),
}

test_item = make_test(ITEMS)
