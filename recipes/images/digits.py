"""Handwritten digits that come with scikit-learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from recipes.images.data_module import ImageDataError, ImageDataModule, Images

TRAIN_FRACTION = 0.8
NUM_DIGITS = 10
_DARKEST = 16.0


class LabelledImages(Dataset[dict[str, Tensor]]):
    """Images in memory with their labels."""

    def __init__(self, pixel_values: Tensor, labels: Tensor) -> None:
        self.pixel_values = pixel_values
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}


class DigitsDataModule(ImageDataModule):
    """The 1797 digits of ``sklearn.datasets.load_digits``: the first 80 % to train on, the last 20 % to validate on.

    They are in the order of the people who wrote them, so that most of those who are validated on have written nothing
    that was trained on.

    Args:
        image_size: Height and width that the digits, which have 8 by 8 pixels, are enlarged to.
        num_channels: The digits are grey; with 3, as for a network for colour images, each channel is the same.
        num_classes: 10, or more for a network that has more.
        batch_size: Images in a batch. With several replicas each of them gets batches of this size.
        num_workers: Processes that prepare batches; 0 does it in the training process, which is fast enough here.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        num_channels: int = 1,
        num_classes: int = 10,
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
        if num_classes < NUM_DIGITS:
            raise ImageDataError(f"data.num_classes is {num_classes}; there are {NUM_DIGITS} digits.")

    def load(self) -> tuple[Images, Images]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / _DARKEST
        images = F.interpolate(images, size=(self.image_size, self.image_size), mode="bilinear") * 2 - 1
        images = images.expand(-1, self.num_channels, -1, -1)
        labels = torch.from_numpy(digits.target).long()
        split_at = int(len(labels) * TRAIN_FRACTION)
        return (
            LabelledImages(images[:split_at], labels[:split_at]),
            LabelledImages(images[split_at:], labels[split_at:]),
        )
