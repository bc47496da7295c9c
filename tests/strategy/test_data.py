"""Who loads, who gets what, and when everybody ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_autopipe import PipelineRuntimeError
from tests.strategy.modules import (
    WIDTH,
    ClassifierModule,
    CombinedData,
    InOrder,
    MixedModule,
    MlpModule,
    class_data,
    in_order,
    regression_data,
)
from tests.strategy.runs import Fit, Report, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")


class CountingData(Dataset[Any]):
    """Knows how often this process asked it for a sample."""

    def __init__(self, num_samples: int) -> None:
        self.data = regression_data(num_samples)
        self.num_asked = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.num_asked += 1
        return self.data[index]


class HookedModule(MlpModule):
    """Counts transfer hooks, and keeps what batches other hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[str] = []
        self.seen: list[float] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append("before")
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append("after")
        return [batch[0] + 1, batch[1]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].sum()))


def counts(trainer: Any, module: Any) -> Any:
    return trainer.datamodule.train.num_asked, len(module.transfers), module.seen


class SeveralValLoaders(InOrder):
    def val_dataloader(self) -> Any:
        module = self.trainer.lightning_module
        return [in_order(module, self.val, self.val_batch_size), in_order(module, class_data(7, seed=4), 3)]


class WrongLength(IterableDataset[Any]):
    """Says that it has more samples than it gives."""

    def __init__(self) -> None:
        self.data = regression_data(16)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        return iter(self.data)


class WrongLengthData(InOrder):
    def train_dataloader(self) -> Any:
        return DataLoader(WrongLength(), batch_size=self.batch_size)


class WorkerData(InOrder):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size, num_workers=2)


FITS = {
    "only the first stage loads": Fit(
        module_class=HookedModule, data=partial(InOrder, CountingData(16), batch_size=4), after=counts
    ),
    "several validation loaders": Fit(
        module_class=ClassifierModule,
        data=partial(SeveralValLoaders, class_data(16), class_data(10, seed=1), batch_size=8, val_batch_size=4),
        trainer_options={"num_sanity_val_steps": 1},
    ),
    "combined loaders": Fit(
        module_class=MixedModule,
        data=partial(CombinedData, regression_data(12), regression_data(4, seed=1), batch_size=4),
        trainer_options={"num_sanity_val_steps": 1},
    ),
    "a length that is wrong": Fit(module_class=MlpModule, data=partial(WrongLengthData, batch_size=4)),
    "workers": Fit(module_class=MlpModule, data=partial(WorkerData, regression_data(16), batch_size=4)),
    "reloaded, limited": Fit(
        module_class=MlpModule,
        data=partial(InOrder, regression_data(16), regression_data(9, seed=1), batch_size=4, val_batch_size=3),
        trainer_options={
            "reload_dataloaders_every_n_epochs": 1,
            "limit_train_batches": 3,
            "limit_val_batches": 2,
            "max_epochs": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Report]]:
    return fit_in_processes(FITS, num_stages=2)


@pytest.mark.parametrize("name", list(FITS))
def test_equals_the_plain_module(name: str, ranks: dict[str, list[Report]]) -> None:
    assert_same_result(fit_plain(FITS[name]), ranks[name])


def test_others_neither_load_nor_transfer(ranks: dict[str, list[Report]]) -> None:
    of_last, of_first = (report.after for report in ranks["only the first stage loads"])
    assert of_first[:2] == (16, 8)
    assert of_last[:2] == (0, 0)
    assert of_first[2] == of_last[2]


# Streams of unequal length -------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return iter(regression_data(self.num_samples))


class UnequalStreams(InOrder):
    """Replica 0 has five batches, replica 1 three."""

    def train_dataloader(self) -> Any:
        replica_index = self.trainer.distributed_sampler_kwargs["rank"]
        return DataLoader(Stream(10 if replica_index == 0 else 6), batch_size=2)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def steps(trainer: Any, module: Any) -> int:
    return int(trainer.global_step)


def test_replicas_end_together() -> None:
    fit = Fit(
        module_class=MlpModule,
        data=partial(UnequalStreams, batch_size=2),
        trainer_options={"max_epochs": 2, "num_sanity_val_steps": 1},
        after=steps,
    )
    ranks = fit_in_processes({"fit": fit}, num_stages=2, num_replicas=2)["fit"]
    assert [rank.after for rank in ranks] == [6] * 4
    assert all(rank.metrics == ranks[0].metrics for rank in ranks)


# Predictions, running statistics, values that are elsewhere ------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[tuple[list[int], float]] = []
        self.at_end: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, _: int
    ) -> None:
        self.written.append((batch_indices, float(prediction.sum())))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.at_end = [tuple(prediction.shape) for prediction in predictions], batch_indices


def predict(trainer: Any, module: Any) -> Any:
    writer = next(callback for callback in trainer.callbacks if isinstance(callback, Writer))
    trainer.predict(module, DataLoader(regression_data(7, seed=3).tensors[0], batch_size=3), return_predictions=False)
    return writer.written, writer.at_end


class NormModule(ClassifierModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def running_mean(trainer: Any, module: Any) -> Any:
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    return module.blocks[1][1].running_mean.clone(), int(module.blocks[1][1].num_batches_tracked)


class Peeking(pl.Callback):
    """Uses what only the last stage has, on all ranks."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        for use in (torch.sum, lambda value: value.shape, lambda value: value + 1, len, lambda v: torch.cat([v])):
            try:
                use(outputs["logits"])
            except PipelineRuntimeError as error:
                self.errors.append(str(error))


def errors(trainer: Any, module: Any) -> list[str]:
    return next(callback for callback in trainer.callbacks if isinstance(callback, Peeking)).errors


def test_predictions_are_written_once_and_statistics_are_replica_0s() -> None:
    fits = {
        "predict": Fit(
            module_class=MlpModule,
            data=partial(InOrder, regression_data(8), batch_size=8),
            callbacks=(Writer,),
            after=predict,
        ),
        "norm": Fit(
            module_class=NormModule,
            data=partial(InOrder, class_data(16), class_data(8, seed=1), batch_size=8),
            strategy_options={"num_microbatches": 2},
            after=running_mean,
        ),
        "elsewhere": Fit(
            module_class=ClassifierModule,
            data=partial(InOrder, class_data(8), batch_size=8),
            callbacks=(Peeking,),
            after=errors,
        ),
    }
    ranks = fit_in_processes(fits, num_stages=2, num_replicas=2)

    plain_written, _ = fit_plain(fits["predict"]).after
    by_sample = {index: total for indices, total in plain_written for index in indices}
    written = [rank.after[0] for rank in ranks["predict"]]
    assert [len(of_rank) for of_rank in written] == [2, 0, 1, 0]
    indices = sorted(index for of_rank in written for batch, _ in of_rank for index in batch)
    assert indices == sorted(by_sample)
    assert ranks["predict"][0].after[1] == ([(3,), (1,)], [[[0, 2, 4], [6]]])

    means, tracked = zip(*(rank.after for rank in ranks["norm"]), strict=True)
    real = [mean for mean in means if float(mean.abs().sum()) > 0]
    assert len(real) >= 2
    assert all(torch.equal(mean, real[0]) for mean in real)
    assert set(tracked) <= {0, 4}

    told = [rank.after for rank in ranks["elsewhere"]]
    assert told[0] == told[2] == []
    assert len(told[1]) == len(told[3]) == 5
    assert "the step's output['logits'] is on the last stage" in told[1][0]
