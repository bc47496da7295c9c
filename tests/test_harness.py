from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import ProcessesFailedError, run_processes, run_processes_to_end


def sum_over_ranks(value: float) -> tuple[int, torch.Tensor, str]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total, os.environ["LOCAL_RANK"]


def sum_over_env_group() -> float:
    dist.init_process_group("gloo")
    return float(sum_over_ranks(0.0)[1])


def has_what_is_preloaded() -> bool:
    return "tests.preloaded" in sys.modules and gc.get_freeze_count() > 0


def end_badly(ends: list[str]) -> str:
    print("about to end", file=sys.stderr)
    end = ends[int(os.environ["RANK"])]
    if end == "raise":
        raise ValueError("a reason")
    if end == "exit":
        os._exit(3)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "hang":
        time.sleep(1000)
    return "fine"


def fit_tiny_module() -> float:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    return float(trainer.global_step)


def test_values_come_back_by_rank() -> None:
    results = run_processes(3, sum_over_ranks, 1.0)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert [float(total) for _, total, _ in results] == [6.0, 6.0, 6.0]
    assert [local for _, _, local in results] == ["0", "1", "2"]


def test_processes_have_imported_what_they_need() -> None:
    """The process that they are forked from says nothing where it cannot import it."""
    assert run_processes(2, has_what_is_preloaded) == [True, True]


@pytest.mark.parametrize("rank_0_hosts_store", [False, True])
def test_group_from_the_environment(rank_0_hosts_store: bool) -> None:
    results = run_processes(
        2, sum_over_env_group, initialize_process_group=False, rank_0_hosts_store=rank_0_hosts_store
    )
    assert results == [1.0, 1.0]


def test_a_trainer_starts_its_own_group() -> None:
    assert run_processes(2, fit_tiny_module, initialize_process_group=False) == [2.0, 2.0]


def test_failures_name_every_rank() -> None:
    with pytest.raises(ProcessesFailedError, match=r"(?s)global rank 1: exit code 1.*ValueError: a reason"):
        run_processes(2, end_badly, ["fine", "raise"])


def test_every_end_is_reported() -> None:
    # Without a group: a slow process could find that another one has ended before they had met.
    outcomes = run_processes_to_end(
        4, end_badly, ["exit", "kill", "hang", "fine"], timeout_s=8, initialize_process_group=False
    )
    ends: list[Any] = [(o.exit_code, o.returned, o.killed_by_harness) for o in outcomes]
    assert ends == [(3, False, False), (-9, False, False), (-9, False, True), (0, True, False)]
    assert "time.sleep" in outcomes[2].output or "end_badly" in outcomes[2].output
    assert all("about to end" in outcome.output for outcome in outcomes)
