"""Tensors that are kept on disk until a checkpoint is written."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.checkpoints.files import FirstErrorFile
from lightning_autopipe.checkpoints.placing import cannot_write
from lightning_autopipe.core.errors import CheckpointError

_ALIGNMENT_BYTES = 64


class Spool:
    """Takes tensors one by one and gives views of a file in their place, so that memory holds one of them at a time.

    The file has no name: it is gone with the last of the views, or with the process.

    Args:
        folders: The file lies in the first of these in which one can be made, else where temporary files do.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._raw, self.folder = _unnamed_file(folders)
        self._file = FirstErrorFile(self._raw)
        self._places: list[tuple[torch.dtype, torch.Size, int]] = []

    def add(self, tensor: Tensor) -> None:
        """Appends a tensor in host memory.

        Raises:
            CheckpointError: there is no room for it.
        """
        self._places.append((tensor.dtype, tensor.shape, self._file.tell()))
        data: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(memoryview(data))
        self._file.write(bytes(-data.nbytes % _ALIGNMENT_BYTES))
        if self._file.error is not None:
            raise cannot_write(self.folder / "(a temporary file)", self._file.error) from self._file.error

    def __del__(self) -> None:
        self._raw.close()

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which they came. Nothing can be added afterwards."""
        if self._file.tell() == 0:
            return [torch.empty(shape, dtype=dtype) for dtype, shape, _ in self._places]
        # Shared and not copied on write: that would count as memory.
        content = mmap.mmap(self._file.fileno(), self._file.tell())
        self._raw.close()
        return [
            torch.frombuffer(content, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            if math.prod(shape)
            else torch.empty(shape, dtype=dtype)
            for dtype, shape, offset in self._places
        ]


def _unnamed_file(folders: Iterable[Path]) -> tuple[io.FileIO, Path]:
    for folder in (*folders, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            return file, folder
    raise CheckpointError("no temporary file can be made, neither in the run's folder nor in that of TMPDIR")
