"""LightningCLI: the name, and the class with its options, checked by jsonargparse."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_autopipe import AutoPipeStrategy
from lightning_autopipe.strategy.options import StrategyOptions
from tests.bare_name import script
from tests.bare_name.commands import run

CLASS_PATH = "lightning_autopipe.AutoPipeStrategy"
APPLICATION = """
from lightning.pytorch.cli import LightningCLI
from script import Regression, loader

class Model(Regression):
    def train_dataloader(self):
        return loader()

if __name__ == "__main__":
    trainer = LightningCLI(Model).trainer
    num_stages = trainer.strategy.layout.num_stages
    print(f"ENDED {trainer.global_rank} {trainer.global_step} {num_stages}", flush=True)  # in one write
"""
TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


@pytest.fixture
def application(tmp_path: Path) -> Path:
    shutil.copy(script.__file__, tmp_path)
    path = tmp_path / "application.py"
    path.write_text(APPLICATION)
    return path


def write_config(path: Path, **trainer: Any) -> Path:
    path.write_text(yaml.safe_dump({"trainer": {**TRAINER, **trainer}}))
    return path


def test_the_class_with_options_in_a_file(user_python: Path, application: Path) -> None:
    strategy = {"class_path": CLASS_PATH, "init_args": {"num_stages": 2, "num_microbatches": 4}}
    config = write_config(application.with_name("settings.yaml"), devices=2, strategy=strategy)
    output = run(user_python, application, "fit", "--config", config, cwd=application.parent)
    assert "2 stages × 1 replica, 1f1b, 4 micro-batches" in output
    for global_rank in range(2):
        assert f"ENDED {global_rank} 2 2" in output


def test_the_name_on_the_command_line(user_python: Path, application: Path) -> None:
    config = write_config(application.with_name("settings.yaml"), devices=1)
    arguments = ("fit", "--config", config, "--trainer.strategy", "autopipe_h")
    output = run(user_python, application, *arguments, cwd=application.parent)
    assert "ENDED 0 2 1" in output


# In this process: how options are read -----------------------------------------------------------


@pytest.fixture(autouse=True)
def users_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def parse(*arguments: object) -> StrategyOptions:
    """The options of the strategy that the command line asks for."""
    texts = [str(argument) for argument in arguments]
    cli = LightningCLI(script.Regression, run=False, args=texts, save_config_callback=None)
    assert type(cli.trainer.strategy) is AutoPipeStrategy
    return cli.trainer.strategy.options


def with_options(*options: str) -> list[str]:
    """A command line with ``--trainer.strategy.<option>`` for each of them."""
    prefixed = [f"--trainer.strategy.{option}" for option in options]
    return ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy", CLASS_PATH, *prefixed]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("num_stages=2", 2),
        ("num_replicas=auto", "auto"),
        ("num_microbatches=8", 8),
        ("schedule=gpipe", "gpipe"),
        ("partition=[3]", [3]),
        ("profile=flops", "flops"),
        ("cut_after=[net.0]", ["net.0"]),
        ("cluster=null", None),
        ("split_batch={weights: null, tokens: 1}", {"weights": None, "tokens": 1}),
        ("loss_over=microbatch", "microbatch"),
        ("verify=false", False),
        ("verify=auto", "auto"),
        ("gather_after_fit=false", False),
        ("deferred_batch_norm=false", False),
        ("shard_optimizer=false", False),
        ("recompute=false", False),
        ("trace=null", None),
        ("process_group_backend=gloo", "gloo"),
        ("timeout=60", 60.0),
        ("timeout=0:01:30", timedelta(seconds=90)),
    ],
)
def test_an_option_is_read(text: str, value: object) -> None:
    found = getattr(parse(*with_options(text)), text.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_stages=two", 'Parser key "num_stages"'),
        ("num_stage=2", "Option 'num_stage' is not accepted"),
        ("partition=3", 'Parser key "partition"'),
        ("split_batch=[1]", 'Parser key "split_batch"'),
        ("gather_after_fit=often", 'Parser key "gather_after_fit"'),
        ("timeout=long", 'Parser key "timeout"'),
    ],
)
def test_a_wrong_option_is_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*with_options(text))
    assert message in capsys.readouterr().err


def test_a_wrong_value_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match='num_stages must be an integer >= 1 or "auto"; got 0'):
        parse(*with_options("num_stages=0"))


def test_a_plan_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"the plan file '.*plan\.json' is not valid"):
        parse(*with_options(f"plan={path}"))
    with pytest.raises(ValueError, match=r"plan='none\.json' is not a file"):
        parse(*with_options("plan=none.json"))


def test_the_printed_config_is_read_as_it_was_meant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = with_options("num_stages=2", "partition=[3]", "split_batch={tokens: 1}", "timeout=0:01:30")
    with pytest.raises(SystemExit) as ended:
        parse(*options, "--print_config")
    assert ended.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    strategy = yaml.safe_load(printed.read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == CLASS_PATH
    assert strategy["init_args"]["num_stages"] == 2
    assert parse("--config", printed) == parse(*options)
