"""The configs compose, whatever is chosen, and the strategy's options are the strategy's parameters."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_autopipe.config import AutoPipeConfig, register_configs
from recipes.bert import BertModule
from recipes.gpt2 import GPT2Module
from recipes.images import ImageFolderDataModule
from recipes.launch import CONFIG_DIR
from recipes.resnet import ResNetModule
from recipes.run import callbacks_from, strategy_from
from recipes.text import MaskedTextDataModule, TextDataModule
from recipes.text.corpus import HubText

GROUPS = ("data", "model", "recipe", "strategy", "trainer", "callbacks", "logger", "paths", "experiment", "debug")
CHOICES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((Path(CONFIG_DIR) / group).glob("*.yaml"))]


def compose_config(*overrides: str, name: str = "train", config_dir: str = CONFIG_DIR) -> DictConfig:
    with initialize_config_dir(config_dir=config_dir, version_base="1.3"):
        return compose(name, overrides=["paths.output_dir=out", *overrides])


def options(**changes: Any) -> dict[str, Any]:
    return dataclasses.asdict(AutoPipeConfig()) | changes


IMAGES = ("data=digits", "data=hub_images", "data=image_folder", "model=resnet")
# What has no default.
REQUIRED = {
    "data=hub_images": ["data.path=cifar10", "data.num_classes=10"],
    "data=hub_text": ["data.hub_text.path=wikitext"],
    "data=image_folder": ["data.folder=images", "data.num_classes=5"],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_resolves(choice: str) -> None:
    recipe = ["recipe=resnet"] if choice.startswith(IMAGES) else []
    cfg: Any = OmegaConf.to_container(compose_config(*recipe, choice, *REQUIRED.get(choice, [])), resolve=True)
    assert cfg["trainer"]["_target_"] == "lightning.pytorch.Trainer"
    for node in (cfg["model"], cfg["data"]):
        target = get_class(node.pop("_target_"))
        inspect.signature(target).bind(**node)


def test_every_group_has_choices() -> None:
    assert {choice.split("=")[0] for choice in CHOICES} == set(GROUPS)


@pytest.mark.parametrize("model", ["tiny", "mini", "small", "base", "medium", "large", "xl"])
@pytest.mark.parametrize(("recipe", "module_class"), [("gpt2", GPT2Module), ("bert", BertModule)])
def test_sizes_are_arguments_of_the_module(model: str, recipe: str, module_class: type) -> None:
    cfg = compose_config(f"recipe={recipe}", f"model={model}", "data.vocab_size=500", "data.block_size=32")
    assert get_class(cfg.model._target_) is module_class
    settings: dict[str, Any] = OmegaConf.to_container(cfg.model, resolve=True)  # type: ignore[assignment]
    del settings["_target_"]
    inspect.signature(module_class).bind(**settings)
    assert (settings["vocab_size"], settings["block_size"]) == (500, 32)
    assert settings["hidden_size"] % settings["num_heads"] == 0


@pytest.mark.parametrize("model", ["resnet_mini", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"])
def test_sizes_of_resnet_fit_the_data(model: str) -> None:
    """The number of parameters is the one that the file's first line gives, with 1000 classes and colour images."""
    cfg = compose_config("recipe=resnet", f"model={model}", "data.num_classes=1000", "data.num_channels=3")
    with torch.device("meta"):
        module = instantiate(cfg.model)
    assert isinstance(module, ResNetModule)
    millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    first_line = (Path(CONFIG_DIR) / "model" / f"{model}.yaml").read_text(encoding="utf-8").split("\n")[0]
    assert f" {millions:.1f} million parameters" in first_line


def test_a_recipe_brings_its_data_and_another_choice_wins() -> None:
    assert instantiate(compose_config("recipe=resnet").data).num_classes == 10
    assert isinstance(instantiate(compose_config("recipe=bert").data), MaskedTextDataModule)
    cfg = compose_config("recipe=resnet", "data=image_folder", "data.folder=images", "data.num_classes=5")
    assert (get_class(cfg.data._target_), cfg.model.num_classes) == (ImageFolderDataModule, 5)
    cfg = compose_config("recipe=bert", "data=hub_text", "data.hub_text.path=wikitext")
    data = instantiate(cfg.data, _convert_="all")
    assert isinstance(data, MaskedTextDataModule)
    assert data.hub_text == HubText(path="wikitext")
    cfg = compose_config("experiment=digits", "model=resnet18")
    assert (cfg.model.depths, cfg.data.batch_size) == ([2, 2, 2, 2], 64)


def test_data_and_callbacks_are_made() -> None:
    cfg = compose_config("callbacks=[default,early_stopping]", "callbacks.model_summary=null", "data.text_file=my.txt")
    data = instantiate(cfg.data)
    assert isinstance(data, TextDataModule)
    assert data.text_file == "my.txt"
    assert [type(callback).__name__ for callback in callbacks_from(cfg.callbacks)] == [
        "ModelCheckpoint",
        "RichProgressBar",
        "EarlyStopping",
    ]
    assert callbacks_from(None) == []


@pytest.mark.parametrize(
    ("experiment", "module_class"), [("demo", GPT2Module), ("bert_demo", BertModule), ("digits", ResNetModule)]
)
def test_experiments_are_two_stages_in_two_processes(experiment: str, module_class: type) -> None:
    cfg = compose_config(f"experiment={experiment}")
    assert get_class(cfg.model._target_) is module_class
    assert (cfg.strategy.num_stages, cfg.trainer.devices, cfg.trainer.accelerator) == (2, 2, "cpu")


def test_strategies_by_name() -> None:
    assert strategy_from(compose_config("strategy=single").strategy) == "auto"
    assert strategy_from(compose_config("strategy=ddp").strategy) == "ddp"


def test_the_pipeline_is_the_default() -> None:
    assert OmegaConf.to_container(compose_config().strategy) == options()
    assert OmegaConf.to_container(compose_config("strategy=autopipe_h").strategy) == options()


def test_options_from_the_command_line() -> None:
    node = compose_config(
        "strategy.num_stages=2", "strategy.partition=[3,5]", "strategy.verify=false", "strategy.timeout=60"
    ).strategy
    assert OmegaConf.to_container(node) == options(num_stages=2, partition=[3, 5], verify=False, timeout=60.0)


@pytest.mark.parametrize(
    "override", ["strategy.num_stage=2", "strategy.num_stages=2.5", "strategy.verify=3", "strategy.timeout=soon"]
)
def test_wrong_options_are_refused(override: str) -> None:
    with pytest.raises(HydraException, match=override.split("=")[0].split(".")[1]):
        compose_config(override)


def test_strategy_in_another_application(tmp_path: Path) -> None:
    """The group is in Hydra's config store: an application needs neither our files nor a call of ours."""
    (tmp_path / "app.yaml").write_text(
        "defaults: [{strategy@trainer.strategy: autopipe_h}, _self_]\n"
        "paths: {output_dir: null}\n"
        "trainer: {strategy: {num_stages: 4}}\n"
    )
    cfg = compose_config(name="app", config_dir=str(tmp_path))
    assert OmegaConf.to_container(cfg.trainer.strategy) == options(num_stages=4)


def test_registering_twice_changes_nothing() -> None:
    register_configs()
    register_configs()
    assert OmegaConf.to_container(compose_config().strategy) == options()


def test_hydra_plugin_imports_no_torch() -> None:
    """Hydra imports it at the start of every application, also of those that have nothing to do with this package."""
    code = "import sys, hydra_plugins.lightning_autopipe; sys.exit({'torch', 'lightning'} & set(sys.modules) != set())"
    environment = {"PYTHONPATH": str(Path(CONFIG_DIR).parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_every_option_is_documented() -> None:
    source = inspect.getsource(AutoPipeConfig)
    for name in options():
        if not name.startswith("_"):
            assert f"    {name}: " in source
            line = next(index for index, text in enumerate(source.split("\n")) if text.startswith(f"    {name}: "))
            assert source.split("\n")[line + 1].startswith('    """'), name


def test_options_are_the_parameters_of_the_strategy() -> None:
    from lightning_autopipe import AutoPipeStrategy

    # What every Lightning strategy takes besides; the Trainer sets it.
    of_lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    parameters = dict(inspect.signature(AutoPipeStrategy).parameters)
    for name in of_lightning:
        del parameters[name]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if isinstance(defaults["timeout"], timedelta):
        defaults["timeout"] = defaults["timeout"].total_seconds()
    assert defaults == {name: value for name, value in options().items() if not name.startswith("_")}
