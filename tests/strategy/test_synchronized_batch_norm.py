"""Fits with `nn.SyncBatchNorm` and `Trainer(sync_batchnorm=True)`, beside plain normalization on one device."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from lightning_autopipe import ConfigurationError
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


def buffers(trainer: Any, module: Any) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def after_synchronized_fit(trainer: Any, module: Any, path: Path) -> dict[str, Tensor]:
    """The layers are plain ones again, in which nothing is left; other runs go on from there."""
    found = buffers(trainer, module)
    assert not any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    trainer.save_checkpoint(path)
    before = float(trainer.callback_metrics["val_loss"])
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(before, rel=1e-12)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, datamodule=trainer.datamodule)
    assert not any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    return found


def fit(
    *,
    norm: Any = nn.SyncBatchNorm,
    num_microbatches: int = NUM_MICROBATCHES,
    trainer_options: dict[str, Any] | None = None,
    after: Any = buffers,
    recomputed: bool | None = None,
    **strategy_options: Any,
) -> Fit:
    return Fit(
        module_class=NormalizedModule,
        module_options={"norm": norm, "recomputed": recomputed},
        data=partial(InOrder, regression_data(NUM_SAMPLES), regression_data(8, seed=1), batch_size=BATCH_SIZE),
        trainer_options=trainer_options or {},
        strategy_options={"num_microbatches": num_microbatches, **strategy_options},
        after=after,
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
            trainer_options={"accumulate_grad_batches": num_microbatches},
            after=buffers,
        )
    )


def assert_same(plain: Report, ranks: list[Report]) -> None:
    """Parameters, gradients, running statistics and what an evaluation computes with them."""
    for rank in ranks:
        for step, expected in enumerate(plain.gradients):
            for name, gradient in rank.gradients[step].items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=f"{name} in {step}")
        for name, value in rank.values.items():
            torch.testing.assert_close(value, plain.values[name], rtol=1e-9, atol=1e-13, msg=name)
    assert ranks[0].after.keys() == plain.after.keys()
    for name, buffer in plain.after.items():
        torch.testing.assert_close(ranks[0].after[name], buffer, rtol=1e-10, atol=1e-13, msg=name)
    assert ranks[0].metrics["val_loss"] == pytest.approx(plain.metrics["val_loss"], rel=1e-9)


USUAL = {"1f1b": fit(), "recomputed": fit(recomputed=False), "recomputed re-entrantly": fit(recomputed=True)}
ON_STAGES = {
    "gpipe": fit(schedule="gpipe"),
    "interleaved_1f1b": fit(schedule="interleaved_1f1b"),
    "zero_bubble": fit(schedule="zero_bubble"),
    "zero_bubble, recomputed": fit(schedule="zero_bubble", recomputed=False),
    "measured and proven": fit(profile="measured", verify=True),
    "the loss over the batch": fit(schedule="gpipe", loss_over="batch"),
}


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 2), (2, 2), (2, 1)])
def test_statistics_are_those_of_all_replicas(num_stages: int, num_replicas: int, tmp_path: Path) -> None:
    plain = reference(num_replicas)
    converted = fit(
        norm=nn.BatchNorm1d,
        trainer_options={"sync_batchnorm": True},
        after=partial(after_synchronized_fit, path=tmp_path / "converted.ckpt"),
    )
    fits = {**USUAL, **(ON_STAGES if (num_stages, num_replicas) == (2, 2) else {}), "converted": converted}
    ranks = fit_in_processes(fits, num_stages=num_stages, num_replicas=num_replicas)
    for name in fits:
        assert_same(plain, ranks[name])
    state = torch.load(tmp_path / "converted.ckpt", weights_only=True)["state_dict"]
    module = seeded(NormalizedModule)
    module.load_state_dict(state)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, plain.after[name], rtol=1e-10, atol=1e-13, msg=name)


class GivenBatches(InOrder):
    """Each replica's batches, by the numbers of their samples."""

    def __init__(self, *batches: list[range | list[int]], num_replicas: int = 1) -> None:
        super().__init__(regression_data(NUM_SAMPLES), regression_data(8, seed=1), batch_size=8)
        self.batches = batches

    def train_dataloader(self) -> Any:
        replica_index = (self.trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
        return DataLoader(self.train, batch_sampler=self.batches[replica_index])


def test_replicas_with_unlike_samples_count_by_them() -> None:
    """Replica 1 traces its second batch, whose shape is new; replica 0 does not, and is not waited for."""
    of_replicas = fit(num_microbatches=2, trainer_options={"use_distributed_sampler": False})
    data = partial(GivenBatches, [range(4), range(4, 8)], [range(8, 12), range(12, 18)])
    ranks = fit_in_processes({"unlike": replace(of_replicas, data=data)}, num_stages=1, num_replicas=2)["unlike"]
    together = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13, 14], [6, 7, 15, 16, 17]]
    one_device = fit(norm=nn.BatchNorm1d, trainer_options={"accumulate_grad_batches": 2})
    assert_same(fit_plain(replace(one_device, data=partial(GivenBatches, together))), ranks)


class UnlikeBatches(InOrder):
    """Replica 1's batches are half as large."""

    def train_dataloader(self) -> Any:
        replica_index = self.trainer.distributed_sampler_kwargs["rank"]
        return DataLoader(self.train, batch_size=self.batch_size // (1 + replica_index))


class FailingModule(NormalizedModule):
    """Fails in the second batch in one process, in the middle of a stage, after a normalization."""

    def __init__(self, how: str, global_rank: int) -> None:
        super().__init__(norm=nn.SyncBatchNorm)
        self.how, self.failing_rank = how, global_rank
        self.calls = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1

    def _convolve(self, x: Tensor) -> Tensor:
        if self.calls == 2 and type(x) is Tensor and self.trainer.global_rank == self.failing_rank:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exception":
                raise ValueError("a reason in one replica")
        return super()._convolve(x)


def fit_and_fail(how: str, num_stages: int, global_rank: int) -> None:
    strategy = AutoPipeStrategy(
        num_stages=num_stages, num_replicas=2, num_microbatches=2, profile="flops", verify=False, timeout=60
    )
    data: Any = UnlikeBatches if how == "unlike batches" else InOrder
    quiet_trainer(strategy, num_processes=2 * num_stages, max_epochs=3).fit(
        seeded(FailingModule, how=how, global_rank=global_rank),
        datamodule=data(regression_data(NUM_SAMPLES), batch_size=4, num_replicas=1),
    )


@pytest.mark.parametrize(
    ("how", "num_stages", "global_rank", "shown"),
    [
        ("exception", 1, 1, "a reason in one replica"),
        ("kill", 2, 2, "global rank 2, stage 1"),
        (
            "unlike batches",
            1,
            -1,
            r"places .*: global rank 0 in a forward of norms\.0 \(.* micro-batch 0 of 2\), global rank 1 .* of 1",
        ),
    ],
)
def test_a_replica_that_fails_or_differs_ends_all(how: str, num_stages: int, global_rank: int, shown: str) -> None:
    outcomes = run_processes_to_end(
        2 * num_stages, fit_and_fail, how, num_stages, global_rank, timeout_s=60, initialize_process_group=False
    )
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None), describe(outcomes)
        assert not outcome.killed_by_harness, describe(outcomes)
    assert re.search(shown, (outcomes[0].traceback or "") + outcomes[0].output), describe(outcomes)


def test_a_process_group_of_its_own_is_refused() -> None:
    module = seeded(NormalizedModule, norm=partial(nn.SyncBatchNorm, process_group="a group"))
    with pytest.raises(ConfigurationError, match=r"norms.0 is a SyncBatchNorm with a process_group of its own"):
        quiet_trainer(AutoPipeStrategy()).fit(module, datamodule=InOrder(regression_data(8), batch_size=8))
