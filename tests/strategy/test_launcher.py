"""What a launch leaves in the environment, and who takes it for its own."""

from __future__ import annotations

import os
import subprocess
import sys

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.strategy import AutoPipeStrategy, process_strategy, refusals
from lightning_autopipe.strategy.launcher import (
    GivenRanksEnvironment,
    ScriptLauncher,
    WorkerLauncher,
    forget_another_launch,
    with_given_ranks,
)

NAMES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's, in which the user has said where the first node is."""
    for name in (*NAMES, "LIGHTNING_AUTOPIPE_STARTED_BY"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def told() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def launch() -> dict[str, str]:
    """What this process has in its environment after a launch."""
    ScriptLauncher(LightningEnvironment(), num_processes=1, num_nodes=1)._call_children_scripts()
    return told()


def test_the_launching_process_keeps_it_for_the_next_fit() -> None:
    left = launch()
    assert left["LOCAL_RANK"] == "0"
    forget_another_launch()
    assert told() == left


def test_a_launched_process_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launch()
    launching = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: launching + 1)
    monkeypatch.setattr(os, "getppid", lambda: launching)
    monkeypatch.setenv("LOCAL_RANK", "1")
    left = told()
    forget_another_launch()
    assert told() == left


def test_a_launched_process_whose_launching_one_has_ended_does_not_launch_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the others, in vain; launching, each orphan would start all processes again."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name, value in {
        "LIGHTNING_AUTOPIPE_STARTED_BY": f"{ended.pid} 12345 LOCAL_RANK",
        "MASTER_PORT": "12345",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    left = told()
    forget_another_launch()
    assert told() == left


@pytest.mark.parametrize(("distance", "local_rank"), [(1, "0"), (2, "1")], ids=["of rank 0", "of rank 1"])
def test_a_command_of_a_process_forgets_it_and_keeps_what_the_user_said(
    distance: int, local_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch()
    launching = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: launching + distance)
    monkeypatch.setattr(os, "getppid", lambda: launching + distance - 1)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    forget_another_launch()
    assert told() == {"MASTER_ADDR": "127.0.0.1"}


def test_what_another_launcher_says_afterwards_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    launch()
    launching = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: launching + 2)
    monkeypatch.setattr(os, "getppid", lambda: launching + 1)
    monkeypatch.setenv("MASTER_PORT", "1")
    left = told()
    forget_another_launch()
    assert told() == left


def test_ranks_that_are_given_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(with_given_ranks(LightningEnvironment())) is LightningEnvironment
    for name, value in {"RANK": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NODE_RANK", "2")
    environment = with_given_ranks(LightningEnvironment())
    assert isinstance(environment, GivenRanksEnvironment)
    assert environment.creates_processes_externally
    assert (environment.global_rank(), environment.world_size()) == (4, 6)
    assert (environment.node_rank(), environment.local_rank()) == (2, 1)
    slurm = SLURMEnvironment()
    assert with_given_ranks(slurm) is slurm, "the user's own choice stays"


def test_processes_are_forked_from_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="autopipe_h", logger=False)
    assert isinstance(trainer.strategy.launcher, ScriptLauncher)
    for module in (process_strategy, refusals):
        monkeypatch.setattr(module, "_IS_INTERACTIVE", True)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="autopipe_h", logger=False)
    launcher = trainer.strategy.launcher
    assert isinstance(launcher, WorkerLauncher)
    assert launcher.is_interactive_compatible


@pytest.mark.parametrize("start_method", ["popen", "spawn", "forkserver"])
def test_what_a_notebook_cannot_start(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_IS_INTERACTIVE", True)
    with pytest.raises(ConfigurationError, match=rf"start_method='{start_method}' .* notebook .* Leave it 'auto'"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=AutoPipeStrategy(start_method=start_method), logger=False)


def test_a_module_that_would_stay_untrained() -> None:
    strategy = AutoPipeStrategy(start_method="spawn", gather_after_fit=False)
    with pytest.raises(ConfigurationError, match=r"gather_after_fit=False it would stay untrained here"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)


def test_processes_of_another_launcher_start_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=AutoPipeStrategy(start_method="spawn"), logger=False)
    assert isinstance(trainer.strategy.launcher, ScriptLauncher)
