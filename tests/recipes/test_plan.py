"""``autopipe plan --recipe``: measured in one process, and run as planned by several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_autopipe.cli import main, recipe_profile
from lightning_autopipe.core import ConfigurationError, ModelProfile, PipelinePlan
from recipes.launch import CONFIG_DIR
from tests.harness import run_processes
from tests.recipes.fits import TEXT

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*isinstance\(treespec, LeafSpec\)", "ignore:.*does not have many workers"
)


def settings(folder: Path) -> list[str]:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return [
        *("model=tiny", "model.hidden_size=32", "trainer=cpu", "data.vocab_size=257", "data.block_size=16"),
        *(f"data.text_file={folder / 'text.txt'}", f"data.cache_dir={folder}", "data.batch_size=4"),
    ]


def fit_by_plan(plan_file: str, overrides: list[str]) -> str | None:
    """A step of the recipe on as many processes as there are; gives the plan that it ran by."""
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        cfg = compose("train", overrides=["recipe=gpt2", *overrides, f"strategy.plan={plan_file}"])
    pl.seed_everything(1, verbose=False)
    strategy = instantiate(cfg.strategy, _convert_="all")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(instantiate(cfg.model, _convert_="all"), datamodule=instantiate(cfg.data, _convert_="all"))
    return None if strategy.plan is None else strategy.plan.to_json()


def test_a_plan_of_a_recipe_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one from the profile that was saved, which knows the module; both on two processes of this machine."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "1")  # set by the run in this process, and undone with it
    monkeypatch.chdir(tmp_path)
    common = ["--devices", "2", "--stages", "2", "--microbatches", "2", "--no-slices"]
    overrides = settings(tmp_path)
    assert main(["plan", "--recipe", "gpt2", *overrides, *common, "-o", "a.json", "--save-profile", "p.json"]) == 0
    output = capsys.readouterr()
    assert "2 stages × 1 replica" in output.out
    assert "can be shown and simulated, but not run" not in output.out
    assert output.err == ""
    profile = ModelProfile.load("p.json")
    assert [table.microbatch_size for table in profile.times] == [2]
    assert main(["plan", "--profile", "p.json", *common, "-o", "b.json"]) == 0
    plans = [PipelinePlan.load(name) for name in ("a.json", "b.json")]
    assert [plan.num_microbatches for plan in plans] == [2, 2]
    assert plans[0].module_fingerprint == plans[1].module_fingerprint == profile.module_fingerprint
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    ran = run_processes(2, fit_by_plans, files, overrides, initialize_process_group=False, timeout_s=100.0)
    assert ran == [[plan.to_json() for plan in plans]] * 2


def fit_by_plans(plan_files: list[str], overrides: list[str]) -> list[str | None]:
    return [fit_by_plan(plan_file, overrides) for plan_file in plan_files]


@pytest.mark.parametrize(
    ("options", "number", "sizes"),
    [
        ([], 4, None),
        (["--microbatches", "2"], 2, [1]),
        (["--microbatches", "2", "--no-slices"], 2, []),
        (["--stages", "1"], 4, None),
    ],
)
def test_several_sizes_are_measured_unless_the_number_is_given(
    options: list[str], number: int, sizes: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around four micro-batches a stage, at most the batch's samples."""
    found: dict[str, Any] = {}

    def measure(*_: Any, **arguments: Any) -> None:
        found.update(arguments)
        raise ConfigurationError("that is all")

    monkeypatch.setattr(recipe_profile, "measured_profile", measure)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--recipe", "gpt2", *settings(tmp_path), "--devices", "2", *options]) == 2
    assert (found["num_microbatches"], found["sizes"]) == (number, sizes)
    assert len(found["optimizers"]) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--recipe", "gpt5"], "recipe 'gpt5': "),
        (["--recipe", "gpt2", "model=enormous"], "recipe 'gpt2': "),
        (["--recipe", "gpt2", "data.nothing=3"], "recipe 'gpt2': "),
        (["--recipe", "gpt2", "trainer=cpu", "strategy.cut_after=[nowhere]"], "nowhere"),
    ],
)
def test_wrong_settings_are_told_in_one_line(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "gpt5" not in arguments:
        arguments = [*arguments[:2], *settings(tmp_path), *arguments[2:]]
    assert main(["plan", *arguments, "--devices", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopipe: error: ")
    assert problem in error
    assert error.count("\n") == 1
