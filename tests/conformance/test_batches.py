"""What batches are: containers of all kinds, with names beside the tensors, and those of several loaders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import Dataset

from tests.conformance.items import Item, make_test
from tests.strategy.modules import InOrder, MlpModule, in_order, regression_data
from tests.strategy.runs import Fit


class Sample(NamedTuple):
    x: Tensor
    y: Tensor
    name: str


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    name: list[str]


class NamedSamples(Dataset[Any]):
    """Samples with a name, which is a number and a space."""

    def __init__(self, kind: str) -> None:
        self.kind, self.data = kind, regression_data(16)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        sample = Sample(*self.data[index], f"{index} ")
        if self.kind == "mapping":
            return {**sample._asdict(), "source": {"file": "a", "line": index}}
        return sample if self.kind == "named tuple" else tuple(sample)


def as_batch(samples: list[Any]) -> Batch:
    x, y, names = zip(*samples, strict=True)
    return Batch(torch.stack(x), torch.stack(y), list(names))


class NamedData(InOrder):
    def __init__(self, *args: Any, kind: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kind = kind

    def train_dataloader(self) -> Any:
        collate = {"collate_fn": as_batch} if self.kind == "dataclass" else {}
        return in_order(self.trainer.lightning_module, NamedSamples(self.kind), self.batch_size, **collate)


class NamesModule(MlpModule):
    """Takes a batch of any kind, and logs what its names say."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            assert batch["source"]["file"] == ["a"] * len(batch["x"])
            batch = Batch(*(batch[key] for key in ("x", "y", "name")))
        elif not isinstance(batch, (Sample, Batch)):
            batch = Batch(*batch)
        assert len(batch.name) == len(batch.x)
        loss = F.mse_loss(self(batch.x), batch.y)
        self.log("train_loss", loss, on_epoch=True)
        self.log(
            "total", float(sum(map(int, batch.name))), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        return loss


class CycleData(InOrder):
    """The shorter of two loaders begins anew."""

    def train_dataloader(self) -> Any:
        module = self.trainer.lightning_module
        loaders = [in_order(module, regression_data(n, seed=n), self.batch_size) for n in (12, 4)]
        return CombinedLoader(loaders, "max_size_cycle")


class CycleModule(MlpModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (torch.cat(parts) for parts in zip(*batch, strict=True))
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss


ITEMS = {
    **{
        f"batches: {kind}, with the names of samples": Item(
            fit=Fit(module_class=NamesModule, data=partial(NamedData, kind=kind, batch_size=8))
        )
        for kind in ("mapping", "named tuple", "tuple", "dataclass")
    },
    "batches: a list of two loaders, max_size_cycle": Item(
        fit=Fit(module_class=CycleModule, data=partial(CycleData, batch_size=4))
    ),
}

test_item = make_test(ITEMS)
