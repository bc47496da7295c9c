"""What the image data modules have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeAlias

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# `pixel_values`, float32 of shape [num_channels, image_size, image_size] in -1 .. 1, and `labels`, a class's number.
Images: TypeAlias = Dataset[dict[str, Tensor]]


class ImageDataError(ValueError):
    """The images to train on are missing, unreadable or other than the settings say."""


class ImageDataModule(LightningDataModule):
    """Images to train on, and others to validate, test and predict on.

    Batches are dicts of ``pixel_values``, float32 of shape ``[batch_size, num_channels, image_size, image_size]`` with
    values from -1 to 1, and ``labels``, int64 of shape ``[batch_size]``. An incomplete last training batch is left out:
    batch normalization needs its micro-batches to be of a good size.

    Args:
        image_size: Height and width in pixels; images are resized to it.
        num_channels: 1 for grey images, 3 for colour.
        num_classes: What an image can be.
        batch_size: Images in a batch. With several replicas each of them gets batches of this size.
        num_workers: Processes that prepare batches; 0 does it in the training process.
    """

    def __init__(
        self, *, image_size: int, num_channels: int, num_classes: int, batch_size: int, num_workers: int
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.num_channels = num_channels
        self.num_classes = num_classes
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._train: Images | None = None
        self._held_out: Images | None = None

    @abstractmethod
    def load(self) -> tuple[Images, Images]:
        """Give the images to train on and those to validate on.

        Raises:
            ImageDataError: They are not what the settings say.
        """

    def setup(self, stage: str | None = None) -> None:
        """Load the images.

        Raises:
            ImageDataError: They are missing, not what the settings say, or too few for a batch.
        """
        if self._train is not None:
            return
        train, held_out = self.load()
        num_images = len(train)  # type: ignore[arg-type]
        if num_images < self.batch_size:
            raise ImageDataError(
                f"There are {num_images} images to train on, fewer than a batch of {self.batch_size}. "
                "Set data.batch_size to a smaller number."
            )
        self._train, self._held_out = train, held_out

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._train, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._held_out, shuffle=False)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._held_out, shuffle=False)

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self._held_out, shuffle=False)

    def _loader(self, images: Images | None, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        if images is None:
            raise RuntimeError(f"Call {type(self).__name__}.setup() first; a Trainer does.")
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
