"""Averages of weights over stages, in checkpoints and with batch normalization."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.runtime.recorded_calls import SMALL
from lightning_autopipe.strategy.weight_averaging import averaging_callbacks
from tests.strategy.configured_modules import ConfiguredModule
from tests.strategy.modules import WIDTH, InOrder, MlpModule, regression_data, values
from tests.strategy.runs import Fit, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = partial(InOrder, regression_data(24), regression_data(8, seed=1), batch_size=8)


def average(trainer: Any, module: Any) -> Any:
    """The average and what it replaced, where both are whole."""
    copy = trainer.callbacks[-1]._average_model
    return {"values": values(module), "copy": values(copy)} if trainer.is_global_zero else None


class InParts(Callback):
    """Counts the large tensors of module and average that are not here: before the first batch, and at the end."""

    def __init__(self) -> None:
        self.absent: list[tuple[int, int]] = []

    def note(self, trainer: Any, module: Any) -> None:
        averages = [callback._average_model.module for callback in averaging_callbacks(trainer.callbacks)]
        large = [is_absent(p) for part in (module, *averages) for _, p in part.named_parameters() if p.numel() >= SMALL]
        self.absent.append((sum(large), len(large)))

    on_fit_start = on_train_end = note


def absences(trainer: Any, module: Any) -> list[tuple[int, int]]:
    return next(callback.absent for callback in trainer.callbacks if isinstance(callback, InParts))


def fit_of_an_average(
    folder: Path, module_class: type[MlpModule], *, ckpt_path: str | None = None, **strategy_options: Any
) -> Fit:
    """Three epochs, with a checkpoint behind each."""
    return Fit(
        module_class=module_class,
        module_options={"optimizer": "adamw"},
        data=DATA,
        callbacks=(
            partial(ModelCheckpoint, dirpath=folder, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=True),
            partial(EMAWeightAveraging, decay=0.6),
            InParts,
        ),
        strategy_options=strategy_options,
        trainer_options={"max_epochs": 3, "enable_checkpointing": True},
        ckpt_path=ckpt_path,
        after=absences,
    )


@pytest.mark.parametrize("module_class", [MlpModule, ConfiguredModule])
def test_an_average_resumes_under_other_numbers_of_stages(tmp_path: Path, module_class: type[MlpModule]) -> None:
    whole = fit_plain(fit_of_an_average(tmp_path / "plain", module_class))
    fits = {
        "file": fit_of_an_average(tmp_path / "file", module_class),
        "shards": fit_of_an_average(tmp_path / "shards", module_class, checkpoint_format="sharded"),
    }
    halves = fit_in_processes(fits, num_stages=2)
    if module_class is ConfiguredModule:
        # Of module and average: nothing is made before it is known where, and then each rank's half.
        assert [rank.after for ranks in halves.values() for rank in ranks] == [[(16, 16), (8, 16)]] * 4
    checkpoint, expected = (
        torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True) for name in ("file", "plain")
    )
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert list(checkpoint[key]) == list(expected[key])
        for name, value in expected[key].items():
            torch.testing.assert_close(checkpoint[key][name], value, rtol=1e-10, atol=1e-12)

    resumed = {
        name: fit_of_an_average(
            tmp_path / f"{name}-resumed", module_class, ckpt_path=str(tmp_path / name / "epoch=1.ckpt")
        )
        for name in fits
    }
    ranks = [fit_plain(resumed["file"])]
    for of_fit in fit_in_processes(resumed, num_stages=3).values():
        ranks += of_fit
    for rank in ranks:
        for name, value in rank.values.items():
            torch.testing.assert_close(value, whole.values[name], rtol=1e-10, atol=1e-12)


class NormModule(MlpModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[0] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def test_stochastic_averages_take_batch_norms_statistics_anew() -> None:
    fit = Fit(
        module_class=NormModule,
        data=DATA,
        strategy_options={"num_microbatches": 1},
        callbacks=(partial(StochasticWeightAveraging, swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1),),
        trainer_options={"max_epochs": 3},
        after=average,
    )
    plain, ranks = fit_plain(fit), fit_in_processes({"fit": fit}, num_stages=2)["fit"]
    assert_same_result(plain, ranks)
    for kind, expected in plain.after.items():
        for name, value in expected.items():
            torch.testing.assert_close(ranks[0].after[kind][name], value, rtol=1e-10, atol=1e-10)
