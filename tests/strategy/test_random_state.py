"""A resumed fit draws as the uninterrupted one: dropout, the order of samples, augmentation; whatever its own seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_autopipe.strategy.random_state import RANDOM_STATE
from tests.strategy.modules import MlpModule, regression_data
from tests.strategy.runs import Fit, Report, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("own sampler", "injected sampler", "stream")


class DropoutModule(MlpModule):
    """Groups of parameters, a schedule of learning rates, dropout in every block."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw", lr=0.01)
        for block in self.blocks:
            block.append(nn.Dropout(0.3))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters(), "lr": 0.03}, {"params": self.blocks.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class AskingModule(DropoutModule):
    """Its data are loaded before a checkpoint is."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Noisy(Dataset[Any]):
    """Augments with all three global generators."""

    def __init__(self) -> None:
        self.data = regression_data(24)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 0.1 * (random.random() + np.random.rand() + float(torch.rand(()))), y


class Stream(IterableDataset[Any]):
    """Shuffles by Python's generator."""

    def __init__(self, data: Dataset[Any], replica_index: int, num_replicas: int) -> None:
        self.data, self.replica_index, self.num_replicas = data, replica_index, num_replicas

    def __iter__(self) -> Iterator[Any]:
        indices = list(range(24))[self.replica_index :: self.num_replicas]
        random.shuffle(indices)
        return (self.data[index] for index in indices)


class Data(pl.LightningDataModule):
    def __init__(self, kind: str, num_replicas: int) -> None:
        super().__init__()
        self.kind, self.num_replicas = kind, num_replicas

    def train_dataloader(self) -> Any:
        data: Any = Noisy()
        if self.kind == "stream":
            assert self.trainer is not None
            rank = (self.trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
            return DataLoader(Stream(data, rank, self.num_replicas), batch_size=8 // self.num_replicas)
        return DataLoader(data, batch_size=8 // self.num_replicas, shuffle=True)


def data_after_seeding(seed: int, kind: str, num_replicas: int) -> Data:
    pl.seed_everything(seed)
    return Data(kind, num_replicas)


def save(path: Path, trainer: Any, module: Any) -> None:
    trainer.save_checkpoint(path)


def fit(kind: str, seed: int, max_epochs: int, *, save_as: Path | None = None, ckpt_path: Path | None = None) -> Fit:
    return Fit(
        module_class=DropoutModule,
        data=partial(data_after_seeding, seed, kind),
        trainer_options={"max_epochs": max_epochs, "use_distributed_sampler": kind == "injected sampler"},
        ckpt_path=None if ckpt_path is None else str(ckpt_path),
        after=None if save_as is None else partial(save, save_as),
    )


def assert_same_values(ranks: list[Report], expected: Report) -> None:
    for rank in ranks:
        for name, value in rank.values.items():
            torch.testing.assert_close(value, expected.values[name], rtol=1e-12, atol=1e-14, msg=name)


def test_resumed_on_any_number_of_stages(tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"{kind}.ckpt" for kind in KINDS}
    fits = {kind: fit(kind, 3, 2) for kind in KINDS}
    fits |= {f"{kind}, first epoch": fit(kind, 3, 1, save_as=path) for kind, path in paths.items()}
    whole = fit_in_processes(fits, num_stages=2)
    resumed = {kind: fit(kind, 99, 2, ckpt_path=path) for kind, path in paths.items()}
    for num_stages in (1, 2, 3):
        for kind, ranks in fit_in_processes(resumed, num_stages=num_stages).items():
            assert_same_values(ranks, whole[kind][0])
    torch.load(paths["stream"], weights_only=True)


class ValidatedData(Data):
    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(8, seed=1), batch_size=4)


def validated_after_seeding(seed: int, num_replicas: int) -> Data:
    pl.seed_everything(seed)
    return ValidatedData("own sampler", num_replicas)


def test_resumed_from_the_end_of_a_validation(tmp_path: Path) -> None:
    """A validation to begin with, data that are loaded early, and beginning the epoch that has ended once more take no
    draws from the rest."""

    def validated(seed: int, max_epochs: int, **changes: Any) -> Fit:
        options = {"max_epochs": max_epochs, "enable_checkpointing": True, "num_sanity_val_steps": 1}
        return Fit(
            module_class=AskingModule,
            data=partial(validated_after_seeding, seed),
            trainer_options=options,
            callbacks=[partial(ModelCheckpoint, tmp_path / f"{seed} {max_epochs}", monitor="val_loss", save_last=True)],
            **changes,
        )

    whole = fit_in_processes({"whole": validated(3, 2), "first": validated(3, 1)}, num_stages=2)["whole"]
    resumed = {"resumed": validated(99, 2, ckpt_path=str(tmp_path / "3 1" / "last.ckpt"))}
    assert_same_values(fit_in_processes(resumed, num_stages=2)["resumed"], whole[0])


def test_each_replica_reads_on(tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"{kind}.ckpt" for kind in KINDS}
    fits = {kind: fit(kind, 3, 2) for kind in KINDS}
    fits |= {f"{kind}, first epoch": fit(kind, 3, 1, save_as=path) for kind, path in paths.items()}
    whole = fit_in_processes(fits, num_stages=2, num_replicas=2)
    resumed = {kind: fit(kind, 99, 2, ckpt_path=path) for kind, path in paths.items()}
    for kind, ranks in fit_in_processes(resumed, num_stages=1, num_replicas=2).items():
        assert_same_values(ranks, whole[kind][0])


def test_a_checkpoint_without_random_state_and_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier version, or a plain Trainer's: the new processes draw by their own seeds."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # put back afterwards: seeding sets it
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    path, older = tmp_path / "new.ckpt", tmp_path / "older.ckpt"
    fit_in_processes({"fit": fit("own sampler", 3, 1, save_as=path)}, num_stages=2)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint.pop(RANDOM_STATE)["seed"] == 3
    torch.save(checkpoint, older)
    fits = {"one": fit("own sampler", 5, 2, ckpt_path=older), "two": fit("own sampler", 6, 2, ckpt_path=older)}
    one, two = fit_in_processes(fits, num_stages=1).values()
    assert not torch.equal(one[0].values["head.weight"], two[0].values["head.weight"])
    fit_plain(fit("own sampler", 5, 2, ckpt_path=path))
