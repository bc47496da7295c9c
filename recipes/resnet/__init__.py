"""ResNet, an image classifier, of any size."""

from recipes.resnet.module import ResNetModule

__all__ = ["ResNetModule"]
