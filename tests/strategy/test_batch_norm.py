"""Row 5: running statistics of batch normalization in fits of several processes, and in their checkpoints."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded
from tests.strategy.runs import Fit, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES = 24
BATCH_SIZE = 12
NUM_MICROBATCHES = 3


class ConvolutionalModule(MlpModule):
    """Convolutions, each with a normalization behind it; neither's input depends on how the other one normalizes.

    Learns nothing: the statistics of the whole batch are comparable though gradients are those of micro-batches.
    """

    def __init__(self, *, checkpointed: bool = False, sync: bool = False) -> None:
        super().__init__(depth=0, lr=0.0)
        self.first = nn.Conv1d(1, 4, 3)
        self.norm = nn.SyncBatchNorm(4) if sync else nn.BatchNorm1d(4)
        self.second = nn.Conv1d(4, 4, 1)
        self.cumulative = nn.BatchNorm1d(4, momentum=None)
        self.head = nn.Linear(24, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.unsqueeze(1))
        normalized = checkpoint(self.norm, h, use_reentrant=False) if self.checkpointed else self.norm(h)
        return self.head((normalized + self.cumulative(self.second(h))).flatten(1)).squeeze(-1)


def buffers(trainer: Any, module: Any, path: Path | None = None) -> dict[str, Tensor]:
    """What rank 0 has after the fit, and what a checkpoint holds."""
    if path is not None:
        trainer.save_checkpoint(path)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def fit(batch_size: int = BATCH_SIZE, path: Path | None = None, deferred: bool = True, **options: Any) -> Fit:
    return Fit(
        module_class=ConvolutionalModule,
        module_options=options,
        data=partial(InOrder, regression_data(NUM_SAMPLES), batch_size=batch_size),
        trainer_options={"max_epochs": 2},
        strategy_options={"deferred_batch_norm": deferred, "num_microbatches": NUM_MICROBATCHES},
        after=partial(buffers, path=path),
    )


def assert_same_buffers(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-14, msg=name)


def test_two_stages(tmp_path: Path) -> None:
    fits = {
        "deferred": fit(path=tmp_path / "deferred.ckpt"),
        "deferred, recomputed": fit(path=tmp_path / "recomputed.ckpt", checkpointed=True),
        "by micro-batch": fit(path=tmp_path / "by-microbatch.ckpt", deferred=False),
        "by micro-batch, recomputed": fit(deferred=False, checkpointed=True),
    }
    by_batch = fit_plain(fit()).after
    by_microbatch = fit_plain(fit(BATCH_SIZE // NUM_MICROBATCHES)).after
    for name, ranks in fit_in_processes(fits, num_stages=2).items():
        assert_same_buffers(ranks[0].after, by_batch if "deferred" in name else by_microbatch)
    for name, expected in (("deferred", by_batch), ("recomputed", by_batch), ("by-microbatch", by_microbatch)):
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert_same_buffers({key: state[key] for key in expected}, expected)


def test_two_stages_in_two_replicas(tmp_path: Path) -> None:
    path = tmp_path / "deferred.ckpt"
    fits = {"plain": fit(path=path), "recomputed": fit(checkpointed=True), "synchronized": fit(sync=True)}
    expected = fit_plain(fit()).after
    for ranks in fit_in_processes(fits, num_stages=2, num_replicas=2).values():
        assert_same_buffers(ranks[0].after, expected)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert_same_buffers({key: state[key] for key in expected}, expected)


@pytest.mark.filterwarnings("default::UserWarning")
def test_an_automatic_number_of_micro_batches_warns_of_batch_normalization() -> None:
    def run(**options: Any) -> list[str]:
        data = InOrder(regression_data(NUM_SAMPLES), batch_size=BATCH_SIZE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(AutoPipeStrategy(**options)).fit(seeded(ConvolutionalModule), datamodule=data)
        return [text for warning in caught if "BatchNorm" in (text := str(warning.message))]

    (message,) = run()
    assert message.startswith("norm is a BatchNorm1d")
    assert "deferred_batch_norm=True" in message
    assert not run(num_microbatches=4)
    assert not run(deferred_batch_norm=True)
