"""Sweeps: each job is a process of its own, with a folder of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from recipes.sweep import SweepError, needs_own_process, report_result
from tests.recipes.commands import end_command, run_command, start_command

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
SMALL = (
    "experiment=digits",
    "model.hidden_sizes=[4,8]",
    "model.depths=[1,1]",
    "model.embedding_size=4",
    "data.image_size=8",
    "data.batch_size=16",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=2",
    "callbacks.progress_bar=null",
    "callbacks.model_summary=null",
    "+trainer.enable_progress_bar=false",
)


def sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(sweep_command(*arguments), folder)


def sweep_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "recipes.train", "--multirun", *SMALL, "hydra.sweep.dir=sweep dir", *arguments]


def test_a_sweep_over_pipelines_of_two_processes(tmp_path: Path) -> None:
    completed = sweep(tmp_path, "strategy.num_stages=1,2", "trainer.devices=${strategy.num_stages}")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("Trained for 2 steps in 1 epochs") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"sweep dir"}
    folders = sorted(path for path in (tmp_path / "sweep dir").iterdir() if path.is_dir())
    assert [path.name for path in folders] == ["0", "1"]
    for num_stages, folder in enumerate(folders, start=1):
        assert (folder / "checkpoints" / "best.ckpt").is_file()
        assert OmegaConf.load(folder / ".hydra" / "config.yaml").strategy.num_stages == num_stages
    losses = [line for line in completed.stdout.splitlines() if "validation loss" in line]
    assert losses[0] == losses[1], "the number of stages changes no result"


def test_a_job_that_fails_is_told(tmp_path: Path) -> None:
    completed = sweep(tmp_path, "data.batch_size=5000", "strategy.num_stages=1", "trainer.devices=1")
    assert completed.returncode == 1
    assert "fewer than a batch of 5000" in completed.stderr
    assert "SweepError: Job 0 of the sweep ended with status 1." in completed.stderr


def test_a_sweep_that_is_asked_to_end_ends_its_job(tmp_path: Path) -> None:
    settings = ("strategy.num_stages=1", "trainer.devices=1", "trainer.max_epochs=1000000", "seed=1,2")
    process = start_command(sweep_command(*settings), tmp_path)
    metrics = tmp_path / "sweep dir" / "0" / "csv" / "version_0" / "metrics.csv"
    try:
        deadline = time.monotonic() + 300
        while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    finally:
        # A job that goes on would hold the output open, and be waited for up to the limit.
        completed = end_command(process, 90)
    assert metrics.exists(), completed.stderr
    assert completed.returncode not in (0, -signal.SIGKILL), completed.stderr
    assert not (tmp_path / "sweep dir" / "1" / "csv").exists(), "no other job is started"


@pytest.mark.parametrize(
    ("mode", "environ", "launcher", "expected"),
    [
        (RunMode.RUN, {}, BASIC, False),
        (RunMode.RUN, {"WORLD_SIZE": "2"}, BASIC, False),
        (RunMode.MULTIRUN, {}, BASIC, True),
        (RunMode.MULTIRUN, {"SLURM_NTASKS": "1"}, BASIC, True),
        (RunMode.MULTIRUN, {"SLURM_NTASKS": "4"}, "submitit", False),
        (RunMode.MULTIRUN, {"SLURM_NTASKS": "4"}, BASIC, None),
        (RunMode.MULTIRUN, {"WORLD_SIZE": "2"}, BASIC, None),
    ],
)
def test_which_jobs_need_a_process_of_their_own(
    monkeypatch: pytest.MonkeyPatch, mode: RunMode, environ: dict[str, str], launcher: str, expected: bool | None
) -> None:
    config = SimpleNamespace(mode=mode, launcher=SimpleNamespace(_target_=launcher))
    monkeypatch.setattr(HydraConfig, "initialized", staticmethod(lambda: True))
    monkeypatch.setattr(HydraConfig, "get", staticmethod(lambda: config))
    if expected is None:
        with pytest.raises(SweepError, match=r"whole sweep in every process\. Start it once, without them"):
            needs_own_process(environ)
    else:
        assert needs_own_process(environ) == expected


def test_results_go_to_the_sweep_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report_result(1.5)
    monkeypatch.setenv("RECIPES_SWEEP_RESULT_FILE", str(tmp_path / "result.json"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    report_result(1.5)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("LOCAL_RANK", "0")
    report_result(1.5)
    assert (tmp_path / "result.json").read_text() == "1.5"
