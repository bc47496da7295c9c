"""What cannot be a pipeline is refused at start, on every rank alike, with the place and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes_to_end
from tests.strategy.modules import (
    Gpt2Module,
    InOrder,
    MlpModule,
    in_order,
    quiet_trainer,
    regression_data,
    seeded,
    token_data,
)
from tests.strategy.runs import Fit, fit_here

pytestmark = pytest.mark.filterwarnings("ignore")


class ContrastiveModule(MlpModule):
    """Two passes through most of the model, which are the step's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*self.blocks)
        self.blocks = nn.ModuleList()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        first = self.net(x)
        second = self.net(x.flip(1))
        return F.mse_loss(self.head(first), self.head(second))


class TwiceModule(MlpModule):
    """R-Drop: two passes through the LightningModule's own forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y) + F.mse_loss(self(x + 0.1), y)


class BranchingModule(MlpModule):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 2
        return self.head(x).squeeze(-1)


class GeneratingModule(Gpt2Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net.generate(batch[0], max_new_tokens=2)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.generate(batch[0], max_new_tokens=2)


class ManualModule(MlpModule):
    automatic_optimization = False


class OwnBackwardModule(MlpModule):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class LbfgsModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class TwoOptimizersModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters()), torch.optim.SGD(self.blocks.parameters())]


class SkippingModule(MlpModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0])


class AssigningModule(MlpModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head.weight.data = self.head.weight.data / 2
        return super().training_step(batch, batch_idx)


class OneRegionModule(MlpModule):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class SamplesModule(MlpModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        xs, ys = batch
        return F.mse_loss(self(torch.stack(xs)), torch.stack(ys))


def unstacked(samples: list[Any]) -> Any:
    return [x for x, _ in samples], [y for _, y in samples]


class UnstackedData(InOrder):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return in_order(self.trainer.lightning_module, self.train, self.batch_size, collate_fn=unstacked)


def predict_here(fit: Fit, num_stages: int, num_replicas: int) -> Any:
    trainer = quiet_trainer(AutoPipeStrategy(num_stages=num_stages, timeout=30), num_processes=num_stages)
    return trainer.predict(seeded(fit.module_class), DataLoader(token_data(8), batch_size=4))


@dataclass(frozen=True, kw_only=True)
class Case:
    module_class: type[MlpModule]
    data: Callable[..., Any] | None = None
    place: tuple[str, ...]
    way_out: tuple[str, ...]
    run: Callable[..., Any] = fit_here
    trainer_options: dict[str, Any] = field(default_factory=dict)


DATA = partial(InOrder, regression_data(16), batch_size=8)
THIS_FILE = "test_refusals.py:"
CASES = {
    "two passes": Case(
        module_class=ContrastiveModule,
        place=("training_step passes 2 times through net", THIS_FILE, "second = self.net(x.flip(1))", "100%"),
        way_out=("torch.cat", "num_stages=1"),
    ),
    "two passes through forward": Case(
        module_class=TwiceModule,
        place=("2 times through the LightningModule", THIS_FILE, "self(x + 0.1)", "100%"),
        way_out=("torch.cat", "num_stages=1"),
    ),
    "a branch between layers": Case(
        module_class=BranchingModule,
        place=("reads the value of an activation in the LightningModule", THIS_FILE, "if x.sum() > 0:"),
        way_out=("Decide on batch data instead",),
    ),
    "generate in validation": Case(
        module_class=GeneratingModule,
        data=partial(InOrder, token_data(16), token_data(8), batch_size=8),
        trainer_options={"num_sanity_val_steps": 1},
        place=("validation_step calls net.generate()", THIS_FILE),
        way_out=("after the run", "num_stages=1"),
    ),
    "generate in prediction": Case(
        module_class=GeneratingModule,
        run=predict_here,
        place=("predict_step calls net.generate()", THIS_FILE),
        way_out=("after the run", "num_stages=1"),
    ),
    "manual optimization": Case(
        module_class=ManualModule,
        place=("ManualModule.automatic_optimization is False", "modules.py:"),
        way_out=("return the loss", "parameter groups"),
    ),
    "several optimizers": Case(
        module_class=TwoOptimizersModule,
        place=("TwoOptimizersModule.configure_optimizers", THIS_FILE),
        way_out=("one optimizer with a parameter group for each",),
    ),
    "LBFGS": Case(
        module_class=LbfgsModule,
        place=("configure_optimizers", THIS_FILE, "LBFGS"),
        way_out=("AdamW",),
    ),
    "own backward": Case(
        module_class=OwnBackwardModule,
        place=("OwnBackwardModule.backward", THIS_FILE),
        way_out=("on_after_backward",),
    ),
    "no loss": Case(
        module_class=SkippingModule,
        place=("training_step", THIS_FILE, "no loss (None)"),
        way_out=("Return the loss of every batch",),
    ),
    "an assigned parameter": Case(
        module_class=AssigningModule,
        place=("head.weight.data", THIS_FILE),
        way_out=("on_train_batch_end",),
    ),
    "nothing to cut": Case(
        module_class=OneRegionModule,
        place=("num_stages=2 is more than the 1 layers", "checkpointed region", "modules.py:"),
        way_out=("num_stages to at most 1", "num_replicas"),
    ),
    "lists of samples": Case(
        module_class=SamplesModule,
        data=partial(UnstackedData, regression_data(16), batch_size=8),
        place=("0, 1 is a list of tensors",),
        way_out=("collate_fn", "num_microbatches=1"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_on_every_rank(name: str) -> None:
    case = CASES[name]
    fit = Fit(module_class=case.module_class, data=case.data or DATA, trainer_options=case.trainer_options)
    outcomes = run_processes_to_end(2, case.run, fit, 2, 1, initialize_process_group=False, timeout_s=60)
    told = describe(outcomes)
    messages = [(outcome.traceback or "").rstrip().rpartition("\n")[2] for outcome in outcomes]
    assert messages[0] == messages[1], told
    assert messages[0].startswith("lightning_autopipe."), told
    assert not any(outcome.killed_by_harness for outcome in outcomes), told
    for part in (*case.place, *case.way_out):
        assert part in messages[0], told


def test_more_micro_batches_than_samples_are_warned_of_once() -> None:
    data = InOrder(regression_data(16), regression_data(8), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(AutoPipeStrategy(num_microbatches=8), max_epochs=2).fit(seeded(MlpModule), datamodule=data)
    (message,) = [str(warning.message) for warning in caught if "num_microbatches" in str(warning.message)]
    assert "num_microbatches=8 is more than a replica's first batch has samples (4)" in message
