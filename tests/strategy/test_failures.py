"""Row 30: whatever fails, every process ends within a bound, and the first error is on rank 0's terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import ProcessOutcome, describe, run_processes, run_processes_to_end
from tests.strategy.modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STAGES = 3
BOUND_S = 30.0


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("a reason in backward")


class FailingModule(MlpModule):
    """Fails in the third batch, in the way and the place that its name says."""

    def __init__(self, how: str) -> None:
        super().__init__(depth=6)
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2 and self.calls >= 3:
                x = self._fail(x)
        return self.head(x).squeeze(-1)

    def _fail(self, x: Tensor) -> Tensor:
        if self.how == "forward" and self.is_real(x):
            raise ValueError("a reason in forward")
        if self.how == "memory" and self.is_real(x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if self.how == "backward":
            return FailsBackward.apply(x)
        if self.how == "exit" and self.is_real(x):
            os._exit(1)
        if self.how == "kill" and self.is_real(x):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang" and self.is_real(x):
            time.sleep(3600)
        return x

    @staticmethod
    def is_real(x: Tensor) -> bool:
        return type(x) is Tensor

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.how == "a hook" and self.calls == 3 and self.trainer.global_rank == 1:
            raise ValueError("a reason in a hook")
        if self.how == "all ranks" and self.calls == 3:
            raise ValueError("a reason in all ranks")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "validation" and batch_idx == 1 and self.trainer.global_rank == 0:
            raise ValueError("a reason in validation")
        super().validation_step(batch, batch_idx)


class FailingData(Dataset[Any]):
    def __init__(self, fails: bool) -> None:
        self.data = regression_data(48)
        self.fails = fails

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.fails and index == 30:
            raise ValueError("a reason in the loader")
        return self.data[index]


def fit_and_fail(how: str) -> None:
    strategy = AutoPipeStrategy(num_replicas=1, num_microbatches=2, timeout=15 if how == "hang" else 60)
    checkpoint = ModelCheckpoint(dirpath=os.environ["CHECKPOINTS"], save_on_exception=True)
    trainer = quiet_trainer(
        strategy, num_processes=NUM_STAGES, max_epochs=3, callbacks=[checkpoint], enable_checkpointing=True
    )
    data = InOrder(FailingData(how == "loader"), regression_data(12, seed=1), batch_size=8, val_batch_size=4)
    trainer.fit(seeded(FailingModule, how=how), datamodule=data)


def end_of(how: str, directory: Any) -> list[ProcessOutcome]:
    return run_processes_to_end(
        NUM_STAGES,
        fit_and_fail,
        how,
        timeout_s=60,
        initialize_process_group=False,
        environment={"CHECKPOINTS": str(directory)},
    )


@pytest.mark.parametrize("how", ["forward", "backward", "a hook", "all ranks", "loader", "validation"])
def test_an_exception_ends_all_processes_and_is_shown_on_rank_zero(how: str, tmp_path: Any) -> None:
    outcomes = end_of(how, tmp_path)
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None), describe(outcomes)
        assert not outcome.killed_by_harness, describe(outcomes)
        assert outcome.ended_after_s < BOUND_S + 20, describe(outcomes)
    shown = (outcomes[0].traceback or "") + outcomes[0].output
    assert f"a reason in {'the loader' if how == 'loader' else how}" in shown, describe(outcomes)
    if how in ("forward", "backward", "a hook"):
        assert "stage 1" in shown, describe(outcomes)
        assert ("micro-batch 0" in shown) == (how != "a hook"), describe(outcomes)
        # What a terminal ends with is the cause, not what followed from it.
        last_line = (outcomes[0].traceback or "").strip().splitlines()[-1]
        assert f"a reason in {how}" in last_line, describe(outcomes)
    # A checkpoint of one stage would be worse than none.
    assert not list(tmp_path.glob("*.ckpt"))


def test_lack_of_memory_is_raised_with_what_to_change(tmp_path: Any) -> None:
    outcomes = end_of("memory", tmp_path)
    assert not any(outcome.killed_by_harness for outcome in outcomes), describe(outcomes)
    said = outcomes[1].traceback or ""
    for words in (
        r"global rank 1 is out of memory: stage 1 of 3 failed in the forward of micro-batch 0: OutOfMemoryError: CUDA",
        r"Planned were \d.* for the stage \(parameters .* micro-batches .*\)\. At its fullest .* had \d",
        r"more num_stages \(now 3\); more num_microbatches \(now 2\).*precision='bf16-mixed'",
    ):
        assert re.search(words, said), describe(outcomes)
    assert "global rank 1 is out of memory" in (outcomes[0].traceback or "").strip().splitlines()[-1]


def test_a_process_that_hangs_ends_all_after_the_timeout(tmp_path: Any) -> None:
    outcomes = end_of("hang", tmp_path)
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None), describe(outcomes)
        assert not outcome.killed_by_harness, describe(outcomes)
    shown = (outcomes[0].traceback or "") + outcomes[0].output
    assert re.search(r"from stage 1 \(global rank 1\) failed \(limit: timeout = 15 s\)", shown), describe(outcomes)
    assert "still running 5 s after a failure; ending now" in outcomes[1].output, describe(outcomes)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_dies_takes_the_others_along(how: str, tmp_path: Any) -> None:
    outcomes = end_of(how, tmp_path)
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None), describe(outcomes)
        assert not outcome.killed_by_harness, describe(outcomes)
    assert "global rank 1, stage 1" in outcomes[0].output, describe(outcomes)


def only_rank_1_fails_to_set_up() -> None:
    module = seeded(MlpModule)
    if os.environ["RANK"] == "1":
        module.automatic_optimization = False
    trainer = quiet_trainer(AutoPipeStrategy(timeout=60), num_processes=2)
    trainer.fit(module, datamodule=InOrder(regression_data(8), batch_size=8))


def test_a_rank_that_refuses_alone() -> None:
    outcomes = run_processes_to_end(2, only_rank_1_fails_to_set_up, timeout_s=60, initialize_process_group=False)
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes), describe(outcomes)
    assert not any(outcome.killed_by_harness for outcome in outcomes), describe(outcomes)
    assert "automatic_optimization is False" in outcomes[0].output, describe(outcomes)


class Interrupted(pl.Callback):
    """Ctrl-C, which a terminal sends to all processes, and a launcher of several machines to one."""

    def __init__(self, global_ranks: tuple[int, ...]) -> None:
        self.global_ranks = global_ranks

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank in self.global_ranks:
            os.kill(os.getpid(), signal.SIGINT)


def fit_until_interrupted(global_ranks: tuple[int, ...]) -> None:
    trainer = quiet_trainer(
        AutoPipeStrategy(num_replicas=1, timeout=60),
        num_processes=2,
        max_epochs=50,
        callbacks=[Interrupted(global_ranks)],
    )
    trainer.fit(seeded(MlpModule), datamodule=InOrder(regression_data(16), batch_size=4))


@pytest.mark.parametrize("global_ranks", [(0,), (0, 1)], ids=["rank 0", "all ranks"])
def test_an_interrupt_ends_all(global_ranks: tuple[int, ...]) -> None:
    outcomes = run_processes_to_end(
        2, fit_until_interrupted, global_ranks, timeout_s=60, initialize_process_group=False
    )
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], describe(outcomes)
    assert not any(outcome.killed_by_harness for outcome in outcomes), describe(outcomes)
    assert "KeyboardInterrupt" in outcomes[0].output + outcomes[1].output, describe(outcomes)


class AsksToEnd(pl.Callback):
    """Rank 1 gets a SIGTERM in this step's batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class ResumableLoader(DataLoader[Any]):
    """Goes on behind the batches that it has given, as Lightning asks of loaders that are to resume in an epoch."""

    num_given = num_skipped = 0

    def __iter__(self) -> Any:
        num_skipped, self.num_skipped, self.num_given = self.num_skipped, 0, 0
        return self._behind(num_skipped)

    def _behind(self, num_skipped: int) -> Any:
        for index, batch in enumerate(super().__iter__()):
            self.num_given = index + 1
            if index >= num_skipped:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped = state["given"]


def fit_to_the_end(callbacks: list[pl.Callback], ckpt_path: str | None = None) -> tuple[int, list[Tensor]]:
    """The steps and, on rank 0, the parameters in the end."""
    trainer = quiet_trainer(
        AutoPipeStrategy(num_replicas=1, profile="flops", verify=False, timeout=60),
        num_processes=2,
        max_epochs=3,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
    )
    module = seeded(MlpModule, optimizer="adamw")
    with contextlib.suppress(SIGTERMException):
        trainer.fit(module, ResumableLoader(regression_data(16), batch_size=4), ckpt_path=ckpt_path)
    is_trained = trainer.is_global_zero and not trainer.received_sigterm
    return trainer.global_step, [p.detach().clone() for p in module.parameters()] if is_trained else []


def fit_until_asked_to_end() -> Any:
    uninterrupted = fit_to_the_end([])
    found = []
    for step in (3, 4):
        folder = Path(os.environ["CHECKPOINTS"]) / str(step)
        checkpoint = ModelCheckpoint(dirpath=folder, save_on_exception=True, every_n_epochs=10)
        steps, _ = fit_to_the_end([AsksToEnd(step), checkpoint])
        (path,) = folder.glob("*.ckpt")
        resumed = fit_to_the_end([], str(path))
        same = [torch.equal(one, other) for one, other in zip(resumed[1], uninterrupted[1], strict=True)]
        found.append((steps, resumed[0], all(same)))
    return found


def test_sigterm_on_one_rank_ends_all_after_the_same_batch_and_the_last_checkpoint_resumes(tmp_path: Any) -> None:
    found = run_processes(
        2,
        fit_until_asked_to_end,
        timeout_s=200,
        initialize_process_group=False,
        environment={"CHECKPOINTS": str(tmp_path)},
    )
    assert found == [[(3, 12, True), (4, 12, True)]] * 2
    # All ranks are there, so the callback that saves on exceptions gets the whole module.
    (path,) = tmp_path.glob("3/*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 3
    seeded(MlpModule).load_state_dict(checkpoint["state_dict"])
