"""Images to classify: scikit-learn's digits, which need no download, folders of images, and Hugging Face data sets."""

from recipes.images.data_module import ImageDataError, ImageDataModule
from recipes.images.digits import DigitsDataModule
from recipes.images.folder import ImageFolderDataModule
from recipes.images.hub import HubImageDataModule

__all__ = ["DigitsDataModule", "HubImageDataModule", "ImageDataError", "ImageDataModule", "ImageFolderDataModule"]
