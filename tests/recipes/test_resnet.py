"""The ResNet module in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything

from recipes.images import DigitsDataModule
from recipes.resnet import ResNetModule

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint directory .* exists and is not empty",
)


def make_module(**settings: Any) -> ResNetModule:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "warmup_steps": 2}
    return ResNetModule(num_classes=10, num_channels=1, **sizes | settings)


def make_trainer(tmp_path: Path, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0} | settings,
    )


def test_sizes_reach_the_model() -> None:
    module = make_module(
        hidden_sizes=(16, 32, 64), depths=(1, 2, 1), layer_type="bottleneck", config={"hidden_act": "gelu"}
    )
    assert [len(stage.layers) for stage in module.model.resnet.encoder.stages] == [1, 2, 1]
    assert module.model.config.layer_type == "bottleneck"
    assert module.model.config.hidden_act == "gelu"
    assert module(torch.randn(2, 1, 32, 32)).shape == (2, 10)


def test_training_learns_the_digits(tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    trainer = make_trainer(tmp_path, max_epochs=3)
    trainer.fit(make_module(learning_rate=1e-2), datamodule=DigitsDataModule(image_size=16, batch_size=64))
    assert float(trainer.callback_metrics["val/accuracy"]) > 0.8


def test_metrics_are_means_over_the_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = DigitsDataModule(image_size=8, batch_size=100)
    module = make_module()
    trainer = make_trainer(tmp_path)
    validation = trainer.validate(module, datamodule=data, verbose=False)[0]
    test = trainer.test(module, datamodule=data, verbose=False)[0]
    predictions = trainer.predict(module, datamodule=data)
    assert predictions is not None

    probabilities = torch.cat(list(predictions))  # type: ignore[arg-type]
    labels = torch.cat([batch["labels"] for batch in data.val_dataloader()])
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(360))
    assert validation["val/loss"] == pytest.approx(float(F.nll_loss(probabilities.log(), labels)), rel=1e-5)
    assert validation["val/accuracy"] == pytest.approx(float((probabilities.argmax(dim=1) == labels).float().mean()))
    assert test == {name.replace("val", "test"): value for name, value in validation.items()}


def test_checkpoint_loads_without_any_setting(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    module = make_module()
    trainer.fit(module, datamodule=DigitsDataModule(image_size=8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = ResNetModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert DigitsDataModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).image_size == 8
