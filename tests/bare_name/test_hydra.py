"""A Hydra application of a user's: the config group comes with the wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bare_name.commands import run

APPLICATION = """
import hydra

@hydra.main(version_base=None, config_path='conf', config_name='config')
def main(config):
    from lightning.pytorch import Trainer

    strategy = hydra.utils.instantiate(config.strategy)
    Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    print(strategy.layout, strategy.options)

main()
"""
DEFAULTS = """
defaults:
  - strategy: autopipe_h
  - _self_
strategy:
  schedule: gpipe
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(DEFAULTS)
    path = tmp_path / "application.py"
    path.write_text(APPLICATION)
    return path


def test_the_options_reach_the_strategy(user_python: Path, application: Path) -> None:
    overrides = ("strategy.num_stages=2", "strategy.partition=[3]", "strategy.split_batch={weights:null,tokens:1}")
    output = run(user_python, application, *overrides, cwd=application.parent)
    assert "ParallelLayout(num_stages=2, num_replicas=1" in output
    assert "schedule='gpipe', partition=[3]" in output
    assert "split_batch={'weights': None, 'tokens': 1}" in output


@pytest.mark.parametrize(
    ("override", "messages"),
    [
        ("strategy.num_stage=2", ("Key 'num_stage' not in 'AutoPipeConfig'",)),
        ("strategy.gather_after_fit=often", ("Value 'often' is not a valid bool", "strategy.gather_after_fit")),
        ("strategy.timeout=long", ("Value 'long'", "could not be converted to Float", "strategy.timeout")),
        ("strategy.num_stages=[2]", ("Value '[2]'", "strategy.num_stages")),
        ("strategy=autopipe", ("Could not find 'strategy/autopipe'", "autopipe_h")),
    ],
)
def test_a_wrong_override_is_refused(
    user_python: Path, application: Path, override: str, messages: tuple[str, ...]
) -> None:
    output = run(user_python, application, override, cwd=application.parent, fails=True)
    assert [message for message in messages if message not in output] == [], output
