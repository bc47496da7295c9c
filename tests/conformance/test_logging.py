"""What is logged, in steps and in hooks, and what loggers write."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import grad_norm

from tests.conformance.items import Item, make_test
from tests.strategy.modules import ClassifierModule, InOrder, MlpModule, class_data, regression_data
from tests.strategy.runs import Fit

DATA = partial(InOrder, regression_data(20), regression_data(8, seed=1), batch_size=8, val_batch_size=4)
CLASS_DATA = partial(InOrder, class_data(16), class_data(8, seed=1), batch_size=8, val_batch_size=4)


class Memory(Logger):
    """Keeps what it is told, on the one rank that tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: list[dict[str, Any]] = []

    name = version = "memory"  # type: ignore[assignment]

    @pl.utilities.rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    @pl.utilities.rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.hyperparameters.append(dict(params))


def written(trainer: Any, module: Any) -> Any:
    """What the loggers of rank 0 were told; None elsewhere, where they are told nothing."""
    told = [(logger.rows, logger.hyperparameters) for logger in trainer.loggers]
    if trainer.is_global_zero:
        return told
    assert all(of_logger == ([], []) for of_logger in told)
    return None


def several_loggers() -> list[Logger]:
    return [Memory(), Memory()]


class LoggingModule(ClassifierModule):
    """Every option, before and after the model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters({"width": 8})
        self.collection = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])

    def log_all(self, prefix: str, x: Any, logits: Any, loss: Any) -> None:
        for on_step, on_epoch in ((False, True), (True, False), (True, True)):
            self.log(f"{prefix}_{on_step:d}{on_epoch:d}", loss, on_step=on_step, on_epoch=on_epoch)
        self.log(f"{prefix}_synced", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(x))
        self.log(f"{prefix}_pbar", loss, prog_bar=True, logger=False)
        self.log(f"{prefix}_rank_zero", loss, rank_zero_only=True)
        found = {"mean": loss.detach(), "sum": logits.detach().sum(), "max": logits.max(), "min": logits.min()}
        for name, value in found.items():
            self.log(f"{prefix}_{name}", value, on_epoch=True, reduce_fx=name)
        self.log_dict({f"{prefix}_a": 1.5, f"{prefix}_b": torch.tensor(2)}, prog_bar=True)
        self.collection.update(logits.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("before", x.mean(), on_step=True, on_epoch=True)
        self.log("weighted", 1.0 * batch_idx, on_epoch=True, batch_size=len(x))
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True, metric_attribute="train_accuracy")
        self.log_all("train", x, logits, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_metrics.update(logits, y)
        self.log_dict(self.val_metrics, on_step=False, on_epoch=True)
        self.log_all("val", x, logits, F.cross_entropy(logits, y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log_all("test", x, logits, F.cross_entropy(logits, y))

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.collection.compute())
        self.collection.reset()

    def on_validation_epoch_end(self) -> None:
        self.log("unlogged", 1.0)


class CollectionModule(ClassifierModule):
    """Logs a collection of metrics of a step, by their objects."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.val_metrics(logits, y)
        self.log_dict(self.val_metrics, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def result_of_test(trainer: Any, module: Any) -> Any:
    rows = written(trainer, module)
    result = trainer.test(module, datamodule=trainer.datamodule, verbose=False)
    return None if rows is None else (rows, result)


class KeepingModule(MlpModule):
    """Keeps results of steps for the hooks at the end of an epoch, as Lightning's users do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[Any] = []
        self.by_kind: dict[str, list[Any]] = {"predictions": [], "targets": []}
        self.count = 0
        self.largest = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        prediction = self(x)
        self.by_kind["predictions"].append(prediction)
        self.by_kind["targets"].append(y)
        self.count += len(x)
        largest = prediction.max()
        self.largest = largest if self.largest is None else torch.maximum(largest, self.largest)

    def on_train_epoch_end(self) -> None:
        self.log("kept_loss", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()

    def on_validation_epoch_end(self) -> None:
        predictions, targets = (torch.cat(self.by_kind[kind]) for kind in ("predictions", "targets"))
        self.log("kept_error", (predictions - targets).abs().mean(), sync_dist=True)
        self.log("num_kept", float(self.count), sync_dist=True, reduce_fx="sum")
        self.log("largest", self.largest, sync_dist=True, reduce_fx="max")
        for kept in self.by_kind.values():
            kept.clear()
        self.count, self.largest = 0, None


class RenamingModule(MlpModule):
    """Logs under names of its own, and keeps predictions for the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.predicted: list[Any] = []
        self.sum = 0.0

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().log(f"mine/{name}", *args, **kwargs)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.predicted.append(super().predict_step(batch, batch_idx))
        return self.predicted[-1]

    def on_predict_epoch_end(self) -> None:
        self.sum = float(torch.cat(self.predicted).sum())


def predicted_sum(trainer: Any, module: Any) -> Any:
    trainer.predict(module, torch.utils.data.DataLoader(regression_data(8, seed=2).tensors[0], batch_size=4))
    total = torch.tensor(module.sum, dtype=torch.float64)
    return float(trainer.strategy.reduce(total, reduce_op="sum")) if trainer.world_size > 1 else float(total)


class HookLogModule(MlpModule):
    """Logs in hooks what only some stages have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach()
        return loss

    def on_train_start(self) -> None:
        self.log("start", 3.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log_dict(grad_norm(self, norm_type=2))
        self.log("num_gradients", float(len(list(self.head.parameters()))))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss_in_hook", outputs["loss"], on_step=True, on_epoch=True)
        self.log("batch_mean", batch[1].mean(), sync_dist=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_index", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


class SomeStagesLog(MlpModule):
    """In hooks, a stage logs what it has; the last one alone has seen the end of a step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.has_seen = True

    def on_validation_batch_end(self, *_: Any) -> None:
        if vars(self).pop("has_seen", False):
            self.log("seen", 5.0, on_epoch=True)


def logs_in_callback() -> Any:
    return LambdaCallback(
        on_train_epoch_end=lambda trainer, module: module.log("from_callback", 2.0 * trainer.current_epoch),
        on_train_batch_end=lambda trainer, module, *_: module.log("each_batch", trainer.global_step * 1.0),
    )


class Experimenting(MlpModule):
    """Writes to the logger itself, where the loss is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.experiment.log_metrics({"own": 1.0}, step=batch_idx)
        if self.trainer.is_global_zero:
            self.logger.log_metrics({"by_hand": 2.0}, step=batch_idx)
        return loss

    def on_fit_start(self) -> None:
        self.logger.log_hyperparams({"lr": self.lr})


def csv_rows(trainer: Any, module: Any) -> Any:
    """What was written, and nothing by other ranks."""
    folder = Path(trainer.logger.log_dir)
    found = None
    if trainer.is_global_zero:
        header, *lines = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines())
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        numbers = [{key: float(value) for key, value in row.items() if value} for row in rows]
        found = (folder / "hparams.yaml").read_text(), numbers
    shutil.rmtree(trainer.logger.save_dir)
    return found


def csv_logger() -> Any:
    return CSVLogger(tempfile.mkdtemp(), name="run", version=0)


ITEMS = {
    "log: every option in every step, several loggers": Item(
        fit=Fit(
            module_class=LoggingModule,
            data=CLASS_DATA,
            logger=several_loggers,
            trainer_options={"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 1},
            after=result_of_test,
        ),
        tolerance=1e-6,  # torchmetrics keeps its sums in float32
    ),
    "log: a MetricCollection in training, of steps and epochs": Item(
        fit=Fit(module_class=CollectionModule, data=partial(InOrder, class_data(16), batch_size=8)), tolerance=1e-6
    ),
    "log: values kept by steps for on_train_epoch_end and on_validation_epoch_end": Item(
        fit=Fit(
            module_class=KeepingModule,
            data=partial(InOrder, regression_data(32), regression_data(16, seed=1), batch_size=8),
            trainer_options={"max_epochs": 2, "val_check_interval": 0.5, "num_sanity_val_steps": 1},
        )
    ),
    "log: hooks, and grad_norm over all stages": Item(
        fit=Fit(
            module_class=HookLogModule,
            data=DATA,
            callbacks=(logs_in_callback,),
            logger=Memory,
            trainer_options={"max_epochs": 2, "log_every_n_steps": 1},
            after=written,
        )
    ),
    "log: overridden; values kept for on_predict_epoch_end": Item(
        fit=Fit(module_class=RenamingModule, data=DATA, after=predicted_sum)
    ),
    "log: in a hook on the last stage only": Item(fit=Fit(module_class=SomeStagesLog, data=DATA)),
    "loggers: CSVLogger, experiment and log_hyperparams in user code": Item(
        fit=Fit(
            module_class=Experimenting,
            data=DATA,
            logger=csv_logger,
            strategy_options={"num_microbatches": 1},
            trainer_options={"log_every_n_steps": 1},
            after=csv_rows,
        )
    ),
}

test_item = make_test(ITEMS)
