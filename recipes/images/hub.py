"""Images of a Hugging Face data set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.hub import load_hub_dataset, require_columns
from recipes.images.data_module import ImageDataError, ImageDataModule, Images
from recipes.images.decode import image_to_tensor


class HubImages(Dataset[dict[str, Tensor]]):
    """Rows of a Hugging Face data set as images and labels, decoded when they are asked for."""

    def __init__(
        self, rows: Any, *, image_column: str, label_column: str, image_size: int, num_channels: int, num_classes: int
    ) -> None:
        self.rows = rows
        self.image_column = image_column
        self.label_column = label_column
        self.image_size = image_size
        self.num_channels = num_channels
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        label = int(row[self.label_column])
        if not 0 <= label < self.num_classes:
            raise ImageDataError(f"Row {index} has the label {label}, but data.num_classes is {self.num_classes}.")
        pixels = image_to_tensor(row[self.image_column], image_size=self.image_size, num_channels=self.num_channels)
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


class HubImageDataModule(ImageDataModule):
    """Images of a Hugging Face data set, which needs ``pip install datasets``.

    Args:
        path: A name on the hub, or a local folder.
        num_classes: How many classes there are; the model is made for as many.
        name: Which of the data set's configurations; None takes its only one.
        train_split: The rows to train on.
        val_split: The rows to validate on.
        image_column: The column of images.
        label_column: The column of classes, numbered from 0.
        image_size: Height and width in pixels that images are resized and cropped to.
        num_channels: 1 for grey images, 3 for colour.
        batch_size: Images in a batch. With several replicas each of them gets batches of this size.
        num_workers: Processes that prepare batches; 0 does it in the training process.
    """

    def __init__(
        self,
        *,
        path: str,
        num_classes: int,
        name: str | None = None,
        train_split: str = "train",
        val_split: str = "test",
        image_column: str = "image",
        label_column: str = "label",
        image_size: int = 224,
        num_channels: int = 3,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            image_size=image_size,
            num_channels=num_channels,
            num_classes=num_classes,
            batch_size=batch_size,
            num_workers=num_workers,
        )
        self.save_hyperparameters()
        self.path = path
        self.config_name = name
        self.train_split = train_split
        self.val_split = val_split
        self.image_column = image_column
        self.label_column = label_column

    def prepare_data(self) -> None:
        """Download the data set, once a machine."""
        self.load()

    def load(self) -> tuple[Images, Images]:
        return self._images(self.train_split), self._images(self.val_split)

    def _images(self, split: str) -> HubImages:
        rows = load_hub_dataset(self.path, name=self.config_name, split=split, setting="data.path")
        require_columns(
            rows, {"data.image_column": self.image_column, "data.label_column": self.label_column}, self.path
        )
        return HubImages(
            rows,
            image_column=self.image_column,
            label_column=self.label_column,
            image_size=self.image_size,
            num_channels=self.num_channels,
            num_classes=self.num_classes,
        )
