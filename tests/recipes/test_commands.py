"""The commands `recipes.train` and `recipes.evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from recipes.evaluate import evaluate
from recipes.launch import CONFIG_DIR, other_rank_overrides
from recipes.train import train
from tests.recipes.commands import run_command

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint directory .* exists and is not empty",
    "ignore:The dirpath has changed",
)

SMALL = (
    "trainer=cpu",
    "trainer.log_every_n_steps=1",
    "model.hidden_size=32",
    "model.num_layers=2",
    "data.vocab_size=300",
    "data.block_size=16",
)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 60, encoding="utf-8")
    return path


def run_train(out: Path, text_file: Path, *overrides: str) -> float | None:
    with initialize_config_dir(config_dir=CONFIG_DIR, version_base="1.3"):
        settings = [f"paths.output_dir={out}", f"paths.cache_dir={out}", f"data.text_file={text_file}"]
        return train(compose("train", overrides=[*SMALL, "strategy=single", *settings, *overrides]))


def run_evaluate(out: Path, *overrides: str) -> float:
    with initialize_config_dir(config_dir=CONFIG_DIR, version_base="1.3"):
        return evaluate(compose("evaluate", overrides=["trainer=cpu", f"paths.output_dir={out}", *overrides]))


def test_fast_dev_run(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = run_train(tmp_path / "out", text_file, "debug=fast_dev_run")
    assert loss is not None
    assert 0.0 < loss < 7.0
    assert "Trained for" not in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.ckpt"))


def test_train_evaluate_and_continue(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    loss = run_train(out, text_file, "trainer.max_epochs=2", "model.warmup_steps=2", "model.dropout=0")
    printed = capsys.readouterr().out
    assert loss is not None
    best = out / "checkpoints" / "best.ckpt"
    assert f"{loss:.6f} nats a token" in printed
    assert "unigram entropy" in printed
    assert f"python -m recipes.evaluate ckpt_path={best}\n" in printed
    assert (out / "csv" / "version_0" / "metrics.csv").read_text().startswith("epoch,step,train/loss")

    assert run_evaluate(out, f"ckpt_path={best}", "require.max_difference=1e-6") == pytest.approx(loss, abs=1e-6)
    assert f"recorded in training  {loss:.6f}" in capsys.readouterr().out

    last = out / "checkpoints" / "last.ckpt"
    continued = run_train(tmp_path / "more", text_file, "trainer.max_epochs=4", f"ckpt_path={last}", "model.dropout=0")
    assert continued is not None
    assert continued < loss
    assert "in 4 epochs" in capsys.readouterr().out


def test_evaluation_that_falls_short(tmp_path: Path, text_file: Path) -> None:
    run_train(
        tmp_path,
        text_file,
        "data.batch_size=1",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=1",
        "trainer.limit_val_batches=1",
    )
    checkpoint = f"ckpt_path={tmp_path / 'checkpoints' / 'best.ckpt'}"
    with pytest.raises(SystemExit, match=r"Fell short: validation loss .* differs from the recorded .*more than 1e-06"):
        run_evaluate(tmp_path, checkpoint, "require.max_difference=1e-6")
    with pytest.raises(
        SystemExit, match=r"Fell short: validation loss .* nats below the unigram entropy .*less than 0\.3"
    ):
        run_evaluate(tmp_path, checkpoint, "require.min_below_entropy=0.3")


def test_evaluation_of_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nowhere\.ckpt \(ckpt_path\)"):
        run_evaluate(tmp_path, f"ckpt_path={tmp_path / 'nowhere.ckpt'}")


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_pipeline_of_two_processes(tmp_path: Path, text_file: Path, launcher: str) -> None:
    """One job, one folder, one tokenizer though the cache is empty; the plain module finds the same loss."""
    module = {
        "lightning": [sys.executable, "-m", "recipes.train"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "recipes.train"],
    }
    settings = ("strategy.num_stages=2", "trainer.devices=2", "trainer.max_epochs=1", f"data.text_file={text_file}")
    completed = run_command([*module[launcher], *SMALL, *settings], tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("Trained for 7 steps in 1 epochs") == 1
    (run_dir,) = (tmp_path / "logs" / "train" / "runs").iterdir()
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert len(list((tmp_path / ".cache" / "recipes").iterdir())) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "logs", ".cache"}
    run_evaluate(run_dir, f"ckpt_path={run_dir / 'checkpoints' / 'best.ckpt'}", "require.max_difference=1e-5")


def test_other_ranks_of_a_launcher_write_no_folder() -> None:
    quiet = ["hydra.output_subdir=null", "hydra/job_logging=stdout"]
    assert other_rank_overrides(["train"], {}) == []
    assert other_rank_overrides(["train"], {"RANK": "0", "LOCAL_RANK": "0"}) == []
    assert other_rank_overrides(["train"], {"LOCAL_RANK": "1"}) == [], "Lightning passes the folder on itself"
    assert other_rank_overrides(["train"], {"RANK": "1"}) == [*quiet, "hydra.run.dir=."]
    assert other_rank_overrides(["train"], {"SLURM_PROCID": "3"}) == [*quiet, "hydra.run.dir=."]
    assert other_rank_overrides(["train", "hydra.run.dir=here"], {"RANK": "1"}) == quiet
