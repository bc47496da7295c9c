"""Fits with `nn.SyncBatchNorm` and `Trainer(sync_batchnorm=True)`, beside plain batch normalization of the whole batch."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes_to_end
from tests.strategy.modules import WIDTH, InOrder, MlpModule, quiet_trainer, regression_data, seeded
from tests.strategy.runs import Fit, Report, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES = 24
BATCH_SIZE = 12
NUM_MICROBATCHES = 3


class NormalizedModule(MlpModule):
    """Normalizations of several kinds between layers; one is called twice."""

    def __init__(self, *, norm: Any = nn.BatchNorm1d, recomputed: bool | None = None, **options: Any) -> None:
        """`recomputed`: not (None), or whether re-entrantly."""
        super().__init__(**options)
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH, momentum=None), norm(WIDTH, affine=False)])
        self.forgetful = norm(WIDTH, track_running_stats=False)
        self.convolution = nn.Conv1d(1, 3, 3)
        self.of_channels = norm(3)
        self.linear = nn.Linear(18, WIDTH)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # what re-entrant recomputation asks for
        for index, block in enumerate(self.blocks):
            x = self._run(lambda x, block=block, index=index: self.norms[index % 3](block(x)).tanh(), x)
        x = self._run(self._convolve, x)
        if self.training:  # else it would normalize by each batch
            x = self.forgetful(x)
        return self.head(x).squeeze(-1)

    def _convolve(self, x: Tensor) -> Tensor:
        return x + self.linear(self.of_channels(self.convolution(x.unsqueeze(1))).flatten(1))

    def _run(self, part: Any, x: Tensor) -> Tensor:
        return part(x) if self.recomputed is None else checkpoint(part, x, use_reentrant=self.recomputed)


def buffers(trainer: Any, module: Any, path: Path | None = None) -> dict[str, Tensor]:
    """What rank 0 has after the fit, and what a checkpoint holds."""
    if path is not None:
        trainer.save_checkpoint(path)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def fit(
    *,
    norm: Any = nn.SyncBatchNorm,
    num_microbatches: int = NUM_MICROBATCHES,
    trainer_options: dict[str, Any] | None = None,
    path: Path | None = None,
    recomputed: bool | None = None,
    **strategy_options: Any,
) -> Fit:
    return Fit(
        module_class=NormalizedModule,
        module_options={"norm": norm, "recomputed": recomputed},
        data=partial(InOrder, regression_data(NUM_SAMPLES), regression_data(8, seed=1), batch_size=BATCH_SIZE),
        trainer_options={"max_epochs": 2, **(trainer_options or {})},
        strategy_options={"num_microbatches": num_microbatches, **strategy_options},
        after=partial(buffers, path=path),
    )


def reference(num_replicas: int, num_microbatches: int = NUM_MICROBATCHES) -> Report:
    """Plain normalization on one device of micro-batch i of all replicas, accumulated over the micro-batches."""
    share = BATCH_SIZE // num_replicas
    size = share // num_microbatches
    order = [
        start + replica + num_replicas * (microbatch * size + position)
        for start in range(0, NUM_SAMPLES, BATCH_SIZE)
        for microbatch in range(num_microbatches)
        for replica in range(num_replicas)
        for position in range(size)
    ]
    assert sorted(order) == list(range(NUM_SAMPLES))
    return fit_plain(
        Fit(
            module_class=NormalizedModule,
            data=partial(
                InOrder,
                Subset(regression_data(NUM_SAMPLES), order),
                regression_data(8, seed=1),
                batch_size=size * num_replicas,
            ),
            trainer_options={"max_epochs": 2, "accumulate_grad_batches": num_microbatches},
            after=buffers,
        )
    )


def assert_same(plain: Report, ranks: list[Report], *, buffers_of: Report | None = None) -> None:
    """Parameters, gradients, running statistics and what an evaluation computes with them."""
    for rank in ranks:
        for step, expected in enumerate(plain.gradients):
            for name, gradient in rank.gradients[step].items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=f"{name} in {step}")
        for name, value in rank.values.items():
            torch.testing.assert_close(value, plain.values[name], rtol=1e-9, atol=1e-13, msg=name)
    expected_buffers = (buffers_of or plain).after
    assert ranks[0].after.keys() == expected_buffers.keys()
    for name, buffer in expected_buffers.items():
        torch.testing.assert_close(ranks[0].after[name], buffer, rtol=1e-10, atol=1e-13, msg=name)
    if buffers_of is None:
        assert ranks[0].metrics["val_loss"] == pytest.approx(plain.metrics["val_loss"], rel=1e-9)


FITS = {
    "1f1b": fit(),
    "gpipe": fit(schedule="gpipe"),
    "recomputed": fit(recomputed=False),
    "recomputed re-entrantly": fit(recomputed=True),
    "zero_bubble": fit(schedule="zero_bubble"),
    "zero_bubble, recomputed": fit(schedule="zero_bubble", recomputed=False),
    "interleaved_1f1b": fit(schedule="interleaved_1f1b"),
    "measured and proven": fit(profile="measured", verify=True),
    "sync_batchnorm=True": fit(norm=nn.BatchNorm1d, trainer_options={"sync_batchnorm": True}),
    "the loss over the batch": fit(schedule="gpipe", loss_over="batch"),
}


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 2), (2, 2), (2, 1)])
def test_statistics_are_those_of_all_replicas(num_stages: int, num_replicas: int) -> None:
    plain = reference(num_replicas)
    fits = {name: one for name, one in FITS.items() if num_stages > 1 or "schedule" not in one.strategy_options}
    ranks = fit_in_processes(fits, num_stages=num_stages, num_replicas=num_replicas)
    for name in fits:
        assert_same(plain, ranks[name])
