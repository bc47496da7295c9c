"""From a picture to numbers."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_MODES = {1: "L", 3: "RGB"}


def image_to_tensor(image: Image.Image, *, image_size: int, num_channels: int) -> Tensor:
    """Give the image as float32 of shape ``[num_channels, image_size, image_size]`` with values from -1 to 1.

    Its shorter side is resized to ``image_size``, and what the longer side has more at both ends is cut off.

    Raises:
        ValueError: ``num_channels`` is neither 1 (grey) nor 3 (colour).
    """
    if num_channels not in _MODES:
        raise ValueError(f"data.num_channels is {num_channels}; it must be 1 (grey) or 3 (colour).")
    image = image.convert(_MODES[num_channels])
    scale = image_size / min(image.size)
    width, height = (max(image_size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - image_size) // 2, (height - image_size) // 2
    image = image.crop((left, top, left + image_size, top + image_size))
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)).reshape(image_size, image_size, num_channels)
    return pixels.permute(2, 0, 1).contiguous() / 127.5 - 1
