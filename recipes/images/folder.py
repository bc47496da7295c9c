"""Images in folders named after their classes."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from recipes.images.data_module import ImageDataError, ImageDataModule, Images
from recipes.images.decode import image_to_tensor

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class FolderImages(Dataset[dict[str, Tensor]]):
    """Image files, read when they are asked for, with the number of the class whose folder they are in."""

    def __init__(self, folder: Path, classes: list[str], *, image_size: int, num_channels: int) -> None:
        self.files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        self.image_size = image_size
        self.num_channels = num_channels
        if not self.files:
            raise ImageDataError(f"No image is in the folders of {folder} (data.folder).")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path, label = self.files[index]
        try:
            with Image.open(path) as image:
                pixels = image_to_tensor(image, image_size=self.image_size, num_channels=self.num_channels)
        except (OSError, UnidentifiedImageError) as error:
            raise ImageDataError(f"The image {path} cannot be read: {error}.") from error
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


class ImageFolderDataModule(ImageDataModule):
    """Images in ``folder/train/CLASS`` to train on and in ``folder/val/CLASS`` to validate on.

    Args:
        folder: The folder with the two parts.
        num_classes: How many folders of classes there are; the model is made for as many.
        image_size: Height and width in pixels that images are resized and cropped to.
        num_channels: 1 for grey images, 3 for colour.
        batch_size: Images in a batch. With several replicas each of them gets batches of this size.
        num_workers: Processes that prepare batches; 0 does it in the training process.
    """

    def __init__(
        self,
        *,
        folder: str,
        num_classes: int,
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
        self.folder = Path(folder)

    def load(self) -> tuple[Images, Images]:
        train, held_out = self.folder / "train", self.folder / "val"
        for part in (train, held_out):
            if not part.is_dir():
                raise ImageDataError(
                    f"There is no folder {part}: data.folder must hold train/CLASS/*.jpg and val/CLASS/*.jpg. "
                    f"A relative path counts from {Path.cwd()}."
                )
        classes = sorted(path.name for path in train.iterdir() if path.is_dir())
        if len(classes) != self.num_classes:
            raise ImageDataError(f"{train} has {len(classes)} classes, but data.num_classes is {self.num_classes}.")
        unknown = sorted({path.name for path in held_out.iterdir() if path.is_dir()} - set(classes))
        if unknown:
            raise ImageDataError(f"{held_out} has classes that {train} lacks: {', '.join(unknown)}.")
        return (
            FolderImages(train, classes, image_size=self.image_size, num_channels=self.num_channels),
            FolderImages(held_out, classes, image_size=self.image_size, num_channels=self.num_channels),
        )
