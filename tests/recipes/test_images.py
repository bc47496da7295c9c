"""Digits and folders of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recipes.images import DigitsDataModule, ImageDataError, ImageFolderDataModule
from recipes.images.decode import image_to_tensor


def test_digits() -> None:
    data = DigitsDataModule(image_size=16, batch_size=50)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == 28, "1437 digits, and the last 37 make no batch"
    for batch in batches:
        assert batch["pixel_values"].shape == (50, 1, 16, 16)
        assert batch["pixel_values"].dtype == torch.float32
        assert -1.0 <= batch["pixel_values"].min() < batch["pixel_values"].max() <= 1.0
    labels = torch.cat([batch["labels"] for batch in data.val_dataloader()])
    assert len(labels) == 360
    assert labels.dtype == torch.int64
    assert labels.bincount().min() > 25, "every digit is among those to validate on"


def test_digits_in_colour() -> None:
    data = DigitsDataModule(num_channels=3, num_classes=1000, image_size=8)
    data.setup("fit")
    (first, *_) = next(iter(data.val_dataloader()))["pixel_values"]
    assert first.shape == (3, 8, 8)
    assert torch.equal(first[0], first[2])


def test_validation_test_and_prediction_read_the_same() -> None:
    data = DigitsDataModule(image_size=8)
    data.setup("fit")
    train = data.train_dataloader().dataset
    data.setup("validate")
    assert data.train_dataloader().dataset is train, "loaded once"
    labels = [
        [batch["labels"].tolist() for batch in loader]
        for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader())
    ]
    assert labels[0] == labels[1] == labels[2]


def test_fewer_classes_than_digits() -> None:
    with pytest.raises(ImageDataError, match=r"data\.num_classes is 9; there are 10 digits"):
        DigitsDataModule(num_classes=9)


def test_batch_that_is_too_large() -> None:
    with pytest.raises(ImageDataError, match=r"1437 images to train on, fewer than a batch of 2000.*data\.batch_size"):
        DigitsDataModule(batch_size=2000).setup("fit")


def test_loaders_before_setup() -> None:
    with pytest.raises(RuntimeError, match=r"Call DigitsDataModule\.setup\(\) first"):
        DigitsDataModule().train_dataloader()


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (3, 3), (16, 17)])
def test_images_are_resized_and_cropped_in_the_middle(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (255, 0, 0))
    tensor = image_to_tensor(image, image_size=8, num_channels=3)
    assert tensor.shape == (3, 8, 8)
    assert tensor.dtype == torch.float32
    assert tensor.amin(dim=(1, 2)).tolist() == tensor.amax(dim=(1, 2)).tolist() == [1.0, -1.0, -1.0]


def test_crop_keeps_the_middle() -> None:
    image = Image.new("L", (24, 8), 0)
    image.paste(255, (8, 0, 16, 8))
    assert (image_to_tensor(image, image_size=8, num_channels=1) == 1.0).all()


def test_modes_of_images() -> None:
    grey = image_to_tensor(Image.new("RGBA", (4, 4), (51, 51, 51, 255)), image_size=4, num_channels=1)
    assert grey.shape == (1, 4, 4)
    assert grey.unique().tolist() == pytest.approx([51 / 127.5 - 1])
    with pytest.raises(ValueError, match=r"data\.num_channels is 2; it must be 1 \(grey\) or 3"):
        image_to_tensor(Image.new("L", (4, 4)), image_size=4, num_channels=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, num in (("train", 3), ("val", 2)):
        for label, name in enumerate(("bird", "cat")):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(num):
                Image.new("L", (6, 6), 255 * label).save(tmp_path / part / name / f"{index}.png")
            (tmp_path / part / name / "notes.txt").write_text("no image")
    return tmp_path


def make_data(folder: Path, **settings: Any) -> ImageFolderDataModule:
    settings = {"num_classes": 2, "image_size": 4, "num_channels": 1, "batch_size": 2} | settings
    return ImageFolderDataModule(folder=str(folder), **settings)


def test_folders(folder: Path) -> None:
    data = make_data(folder)
    data.setup("fit")
    batches = list(data.val_dataloader())
    assert [batch["labels"].tolist() for batch in batches] == [[0, 0], [1, 1]]
    assert [batch["pixel_values"].unique().tolist() for batch in batches] == [[-1.0], [1.0]]
    assert len(list(data.train_dataloader())) == 3


def test_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ImageDataError, match=r"no folder .*train: data\.folder must hold train/CLASS.*counts from"):
        make_data(tmp_path / "nowhere").setup("fit")


def test_other_number_of_classes(folder: Path) -> None:
    with pytest.raises(ImageDataError, match=r"train has 2 classes, but data\.num_classes is 3"):
        make_data(folder, num_classes=3).setup("fit")


def test_class_that_is_not_trained_on(folder: Path) -> None:
    (folder / "val" / "dog").mkdir()
    with pytest.raises(ImageDataError, match=r"val has classes that .*train lacks: dog"):
        make_data(folder).setup("fit")


def test_folders_without_images(folder: Path) -> None:
    for path in (folder / "val").rglob("*.png"):
        path.unlink()
    with pytest.raises(ImageDataError, match=r"No image is in the folders of .*val \(data\.folder\)"):
        make_data(folder).setup("fit")


def test_image_that_cannot_be_read(folder: Path) -> None:
    broken = folder / "val" / "bird" / "0.png"
    broken.write_bytes(b"no image")
    data = make_data(folder)
    data.setup("fit")
    with pytest.raises(ImageDataError, match=r"The image .*0\.png cannot be read"):
        next(iter(data.val_dataloader()))
