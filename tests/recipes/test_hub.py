"""Hugging Face data sets, with a stand-in for the package that reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from recipes.hub import MissingDatasetsError
from recipes.images import HubImageDataModule, ImageDataError
from recipes.text import MaskedTextDataModule, TextDataModule
from recipes.text.corpus import CorpusError, HubText, load_corpus


class Rows:
    """As far as the recipes need it, a ``datasets.Dataset``."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], Rows]:
    """What is on the hub, by path, name and split."""
    contents: dict[tuple[str, str | None, str], Rows] = {}
    module: Any = ModuleType("datasets")
    module.load_dataset = lambda path, name, *, split: contents[path, name, split]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return contents


@pytest.fixture
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


def test_text(hub: dict[Any, Rows]) -> None:
    hub["wiki", "small", "train[:1%]"] = Rows(content=["ab" * 10, "cd" * 10])
    corpus = load_corpus(None, HubText(path="wiki", name="small", split="train[:1%]", column="content"))
    assert corpus.train + corpus.held_out == "ab" * 10 + "\n" + "cd" * 10


@pytest.mark.parametrize("data_class", [TextDataModule, MaskedTextDataModule])
def test_text_data_module(hub: dict[Any, Rows], tmp_path: Path, data_class: type[TextDataModule]) -> None:
    hub["wiki", None, "train"] = Rows(text=["the dog sleeps. "] * 50)
    data = data_class(hub_text={"path": "wiki"}, vocab_size=270, block_size=8, batch_size=4, cache_dir=str(tmp_path))
    data.prepare_data()
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["input_ids"].shape == (4, 8)


def test_text_column_that_is_missing(hub: dict[Any, Rows]) -> None:
    hub["wiki", None, "train"] = Rows(title=["a"], body=["b"])
    with pytest.raises(ValueError, match=r"'wiki' has no column 'text' \(data\.hub_text\.column\); it has title, body"):
        load_corpus(None, HubText(path="wiki"))


def test_two_sources_of_text(hub: dict[Any, Rows], tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"Both data\.text_file and data\.hub_text"):
        load_corpus(tmp_path / "a.txt", HubText(path="wiki"))


def test_short_text(hub: dict[Any, Rows]) -> None:
    hub["wiki", None, "train"] = Rows(text=[" "])
    with pytest.raises(CorpusError, match=r"data set 'wiki' \(data\.hub_text\.path\) has 1 characters"):
        load_corpus(None, HubText(path="wiki"))


@pytest.mark.usefixtures("no_datasets")
def test_text_without_the_package() -> None:
    with pytest.raises(
        MissingDatasetsError, match=r"data\.hub_text\.path=wiki is a Hugging Face data set.*pip install datasets"
    ):
        load_corpus(None, HubText(path="wiki"))


def make_images(num: int, labels: list[int]) -> Rows:
    return Rows(img=[Image.new("L", (6, 6), 255 * (i % 2)) for i in range(num)], label=labels)


def test_images(hub: dict[Any, Rows]) -> None:
    hub["shapes", None, "train"] = make_images(4, [0, 1, 0, 1])
    hub["shapes", None, "test"] = make_images(2, [0, 1])
    data = HubImageDataModule(path="shapes", num_classes=2, image_column="img", image_size=4, batch_size=2)
    data.prepare_data()
    data.setup("fit")
    (batch,) = data.val_dataloader()
    assert batch["pixel_values"].shape == (2, 3, 4, 4)
    assert batch["pixel_values"].amax(dim=(1, 2, 3)).tolist() == [-1.0, 1.0]
    assert batch["labels"].tolist() == [0, 1]
    assert batch["labels"].dtype == torch.int64


def test_image_column_and_label_that_are_wrong(hub: dict[Any, Rows]) -> None:
    hub["shapes", None, "train"] = make_images(2, [0, 2])
    hub["shapes", None, "test"] = make_images(2, [0, 1])
    with pytest.raises(ValueError, match=r"'shapes' has no column 'image' \(data\.image_column\); it has img, label"):
        HubImageDataModule(path="shapes", num_classes=2, batch_size=2).setup("fit")
    data = HubImageDataModule(path="shapes", num_classes=2, image_column="img", image_size=4, batch_size=2)
    data.setup("fit")
    with pytest.raises(ImageDataError, match=r"Row 1 has the label 2, but data\.num_classes is 2"):
        next(iter(data.train_dataloader()))


@pytest.mark.usefixtures("no_datasets")
def test_images_without_the_package() -> None:
    with pytest.raises(MissingDatasetsError, match=r"data\.path=shapes is a Hugging Face.*pip install datasets"):
        HubImageDataModule(path="shapes", num_classes=2).prepare_data()
