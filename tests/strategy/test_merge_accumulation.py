"""The batches of an accumulation window as one pipeline: the numbers of the same fit batch by batch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from torch import nn

from lightning_autopipe.core.errors import BatchError, ConfigurationError, PlanError
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.window import BatchEnds, units_by_batch
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import (
    ClassifierModule,
    InOrder,
    LanguageModule,
    MlpModule,
    class_data,
    regression_data,
    token_data,
)
from tests.strategy.runs import Fit, Report, assert_same_result, fit_here, run_processes

pytestmark = pytest.mark.filterwarnings("ignore")


class BySamplesModule(MlpModule):
    """A loss that is a mean over samples by itself, dropout, and a factor that depends on the batch's index."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dropout = nn.Dropout(0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = (self.dropout(self(x)) - y).abs().mean() * (1 + batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("index", float(batch_idx), on_step=True, on_epoch=False)
        return loss


class MetricsModule(ClassifierModule):
    """Its hook takes what there is of an output: of a batch that waits there is nothing but a loss."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not math.isnan(float(outputs["loss"])):
            super().on_train_batch_end(outputs, batch, batch_idx)


class Watch(pl.Callback):
    """What a callback is given after each batch, and what is logged by then."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics.get("train_loss_step", math.nan)))


def watched(trainer: Any, module: Any) -> Any:
    (watch,) = [callback for callback in trainer.callbacks if isinstance(callback, Watch)]
    replicas = trainer.strategy.session.training.gradients.ledger._replicas
    return watch.losses, watch.logged, 0 if replicas is None else replicas.num_early


def schedule_of_windows() -> pl.Callback:
    return GradientAccumulationScheduler(scheduling={0: 1, 1: 3})


def strict_stopping() -> pl.Callback:
    return EarlyStopping("train_loss", check_finite=True, patience=10, check_on_train_epoch_end=True)


FITS = {
    "samples": Fit(
        module_class=BySamplesModule,
        module_options={"optimizer": "adamw", "lr": 0.05},
        data=partial(InOrder, regression_data(34), regression_data(8, seed=1), batch_size=8, val_batch_size=4),
        trainer_options={"accumulate_grad_batches": 3, "max_epochs": 2},
        callbacks=(Watch, strict_stopping),
        after=watched,
    ),
    "tokens": Fit(
        module_class=LanguageModule,
        module_options={"optimizer": "adamw", "lr": 0.05},
        data=partial(InOrder, token_data(72, valid=[1, 5, 7, 0, 3, 2, 0, 4, 6]), batch_size=8),
        trainer_options={"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        callbacks=(Watch,),
        after=watched,
    ),
    "windows of changing length": Fit(
        module_class=BySamplesModule,
        data=partial(InOrder, regression_data(40), batch_size=8),
        strategy_options={"num_microbatches": 2},
        trainer_options={"max_epochs": 2},
        callbacks=(Watch, schedule_of_windows),
        after=watched,
    ),
    "metrics": Fit(
        module_class=MetricsModule,
        data=partial(InOrder, class_data(32), class_data(8, seed=1), batch_size=8, val_batch_size=4),
        trainer_options={"accumulate_grad_batches": 3},
    ),
}


IN_PROCESSES = ("samples", "tokens")


def merged(fit: Fit, **options: Any) -> Fit:
    return replace(fit, strategy_options={**fit.strategy_options, "merge_accumulation": True, **options})


def both_ways(num_stages: int, num_replicas: int) -> dict[str, tuple[Report, Report]]:
    return {
        name: (fit_here(FITS[name], num_stages, num_replicas), fit_here(merged(FITS[name]), num_stages, num_replicas))
        for name in IN_PROCESSES
    }


def test_equal_to_batch_by_batch() -> None:
    by_rank = run_processes(4, both_ways, 2, 2, initialize_process_group=False, timeout_s=150.0)
    for name in IN_PROCESSES:
        for results in by_rank:
            batch_by_batch, merged_windows = results[name]
            assert_same_result(batch_by_batch, [merged_windows])
            assert merged_windows.num_reductions == batch_by_batch.num_reductions
    (expected, logged_by_batch, early_by_batch), (losses, logged, early) = (
        report.after for report in by_rank[0]["samples"]
    )
    assert early_by_batch == 0, "nothing is summed before a window has ended"
    assert early == 3, "one bucket for each merged window but for the first, whose first batch ran by itself"
    stored = [math.isnan(loss) for loss in losses]
    # The first step of a fit runs by itself, and tells what its loss is weighted by.
    assert stored == [False, True, False, True, False, True, True, False, True, False]
    kept = [index for index, is_stored in enumerate(stored) if not is_stored]
    assert [losses[index] for index in kept] == pytest.approx([expected[index] for index in kept])
    assert [logged[index] for index in kept] == pytest.approx([logged_by_batch[index] for index in kept])
    assert not any(math.isnan(value) for value in logged)


def test_nothing_trips_over_the_loss_of_a_batch_that_waits() -> None:
    fit = replace(FITS["samples"], trainer_options={"accumulate_grad_batches": 3, "detect_anomaly": True})
    assert_same_result(fit_here(fit, 1, 1), [fit_here(merged(fit), 1, 1)])


@pytest.mark.parametrize("name", ["windows of changing length", "metrics"])
def test_in_one_process(name: str) -> None:
    fit = FITS[name]
    assert_same_result(fit_here(fit, 1, 1), [fit_here(merged(fit), 1, 1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpipe"}, r"GPipe \(as schedule or plan say\) keeps"),
        ({"loss_over": "batch"}, r"GPipe \(which loss_over='batch' takes\) keeps"),
        ({"deferred_batch_norm": True}, "batch by batch"),
    ],
)
def test_what_cannot_be_merged_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{message}.*merge_accumulation"):
        AutoPipeStrategy(merge_accumulation=True, **options)


class ChangingModule(BySamplesModule):
    """Tells a weight of its own for some batches only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "loss_weight": 3} if batch_idx == 2 else loss


def test_weights_that_appear_in_the_middle_are_an_error() -> None:
    fit = merged(replace(FITS["windows of changing length"], module_class=ChangingModule))
    fit = replace(fit, trainer_options={"accumulate_grad_batches": 3}, callbacks=(), after=None)
    with pytest.raises(BatchError, match=r"losses weigh 6, but it has 8 samples.*merge_accumulation=False"):
        fit_here(fit, 1, 1)


def test_batches_of_a_window_are_told_apart() -> None:
    units = [(0, 0), (0, 1), (1, None), (2, None), (3, 0), (3, 1)]
    assert units_by_batch(units, [1, 2, 1]) == [[(0, 0), (0, 1)], [(0, None), (1, None)], [(0, 0), (0, 1)]]
    schedule = get_schedule("zero_bubble", 2, 4)
    ends: list[tuple[int, int]] = []
    observer = BatchEnds(schedule, 0, [1, 2, 1], lambda position: ends.append((position, seen)), None)
    for action in schedule.actions_by_rank[0]:
        seen = action.microbatch_index
        observer.ran(action, 0.0, 0.0, 0.0)
    assert ends == [(0, 0), (1, 2)]
    mixed = get_schedule(ScheduleSpec(name="interleaved_1f1b", stages_per_rank=2), 8, 4)
    with pytest.raises(PlanError, match="cannot be told apart"):
        BatchEnds(mixed, 0, [2, 2], lambda _: None, None)
