"""Writes one file that `torch.load` reads."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_autopipe.checkpoints.placing import replacing


class FirstErrorFile:
    """A new file that remembers its first error and goes on as if it had written.

    An error in the middle of `torch.save` comes out of it as another one, which tells of positions in the file.
    """

    def __init__(self, raw: io.FileIO) -> None:
        self.error: OSError | None = None
        self._raw = raw
        self._position = 0

    def write(self, data: Any) -> int:
        """Writes bytes; gives their number."""
        rest = memoryview(data).cast("B")
        self._position += rest.nbytes
        try:
            while rest and self.error is None:
                rest = rest[self._raw.write(rest) :]
        except OSError as error:
            self.error = error
        return memoryview(data).nbytes

    def tell(self) -> int:
        """How many bytes have been written."""
        return self._position

    def flush(self) -> None:
        """Nothing: it is not buffered, or closing it would try again what could not be written."""

    def close(self) -> None:
        """Nothing: it is closed at the end of `written_file`."""

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._raw.fileno()


@contextlib.contextmanager
def written_file(path: Path) -> Iterator[FirstErrorFile]:
    """A new file, on the disk at the end.

    Raises:
        OSError: the first error of a write.
    """
    with io.FileIO(path, "wb") as raw:
        file = FirstErrorFile(raw)
        yield file
        if file.error is not None:
            raise file.error
        os.fsync(raw.fileno())


def write_file(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Writes a checkpoint to one file, whole or not at all, tensor by tensor.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written to.
    """
    with replacing(Path(path)) as partial, written_file(partial) as file:
        torch.save(checkpoint, file)  # type: ignore[arg-type]
