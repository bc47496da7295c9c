"""Writes a folder of shards: what `torch.distributed.checkpoint` writes, and a file of all that is no large tensor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from lightning_autopipe.checkpoints.files import written_file
from lightning_autopipe.checkpoints.placing import put_in_place, sync_folder
from lightning_autopipe.core.errors import CheckpointError

REST_NAME = "checkpoint.pt"
"""The file of everything but the tensors of module and optimizers."""
SHARDED_ENTRIES = ("state_dict", "optimizer_states")
"""The entries of a checkpoint whose tensors are stored apart from the rest."""


class ShardWriter(FileSystemWriter):
    """Writes under a partial name; the coordinator completes the folder and puts it in its place.

    Args:
        partial: Where the ranks write; there, and empty.
        target: Where the folder goes.
        rest: Content of the file of the rest; only the coordinator's is written.
        names: Of the tensors that the rest refers to.
    """

    def __init__(self, partial: Path, target: Path, *, rest: bytes, names: Collection[str]) -> None:
        super().__init__(partial)
        self.fs = _Files()
        self._partial, self._target = partial, target
        self._rest, self._names = rest, names

    def storage_meta(self) -> StorageMeta:
        # As text: a path could not be read without unpickling any class.
        return StorageMeta(checkpoint_id=os.fspath(self._target), save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        missing = sorted(set(self._names) - metadata.state_dict_metadata.keys())
        if missing:
            raise CheckpointError(
                f"no process has given the values of {', '.join(missing[:3])} ({len(missing)} in all) to the "
                "checkpoint: on_save_checkpoint must do the same on all ranks"
            )
        with written_file(self._partial / REST_NAME) as file:
            file.write(self._rest)
        super().finish(metadata, results)
        sync_folder(self._partial)
        put_in_place(self._partial, self._target)


class _Files(FileSystem):
    """Raises the first error of a write as it is."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with written_file(Path(path)) as file:
            yield file
