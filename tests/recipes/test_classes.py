"""Which classes a checkpoint belongs to."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest

from recipes.classes import RecordClasses, recorded_class
from recipes.images import DigitsDataModule
from recipes.resnet import ResNetModule


def make_checkpoint() -> dict[str, object]:
    module = ResNetModule(num_classes=10, num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1])
    callback = RecordClasses(module, DigitsDataModule())
    return {"callbacks": {callback.state_key: callback.state_dict()}}


def test_classes_come_back() -> None:
    checkpoint = make_checkpoint()
    assert recorded_class(checkpoint, "model", pl.LightningModule) is ResNetModule
    assert recorded_class(checkpoint, "data", pl.LightningDataModule) is DigitsDataModule


@pytest.mark.parametrize("checkpoint", [{}, {"callbacks": {}}, {"callbacks": {"RecordClasses": {}}}])
def test_checkpoints_of_others(checkpoint: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=r"recipes\.train did not write it\. Set data\._target_, as in data\._target_="
    ):
        recorded_class(checkpoint, "data", pl.LightningDataModule)


def test_a_name_that_is_no_module() -> None:
    with pytest.raises(ValueError, match=r"its model is a recipes\.images\.digits\.DigitsDataModule, which is no"):
        recorded_class(
            {"callbacks": {"RecordClasses": {"model": "recipes.images.digits.DigitsDataModule"}}},
            "model",
            pl.LightningModule,
        )
