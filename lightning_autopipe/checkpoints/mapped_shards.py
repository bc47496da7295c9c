"""Tensors of a sharded checkpoint that stay in its files until they are used."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache


class MappedFiles:
    """The files of a folder, mapped into memory: all processes of a machine share what they read of them.

    Args:
        folder: where the files are.
        slice_file: gives the part of an open file at a place, as a file of its own.
    """

    def __init__(self, folder: Path, slice_file: Callable[[Any, Any], Any]) -> None:
        self._folder = folder
        self._slice_file = slice_file
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, place: Any) -> Tensor | None:
        """The tensor at a place; None where the file does not hold it as memory does, so that it has to be read.

        Args:
            place: the entry of the metadata's ``storage_data``.
        """
        path = self._folder / place.relative_path
        with path.open("rb") as file:
            if place.transform_descriptors:
                return None
            reader = FakeTensorMode()  # reads everything but the numbers
            with disable_fake_tensor_cache(reader), reader:  # which is the process's, and keeps every storage
                described = torch.load(self._slice_file(file, place), map_location="cpu", weights_only=True)
            storage = described.untyped_storage()
            begin, num_values = storage._checkpoint_offset, storage.nbytes() // described.element_size()
            if begin is None:
                return None
            if not num_values:
                return torch.empty_strided(described.shape, described.stride(), dtype=described.dtype)
            if place.relative_path not in self._maps:
                # What is written to it changes this process's pages only, and no file.
                self._maps[place.relative_path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        content = torch.frombuffer(
            self._maps[place.relative_path], dtype=described.dtype, count=num_values, offset=place.offset + begin
        )
        return content.as_strided(described.shape, described.stride(), described.storage_offset())
