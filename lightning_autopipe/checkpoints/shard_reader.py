"""Reads a folder of shards, by one process, and trusts nothing in it."""

from __future__ import annotations

import enum
import importlib
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_autopipe.checkpoints.mapped_shards import MappedFiles
from lightning_autopipe.checkpoints.shard_writer import REST_NAME, SHARDED_ENTRIES
from lightning_autopipe.checkpoints.structure import names_in, put_tensors
from lightning_autopipe.core.errors import CheckpointError

_METADATA_NAME = ".metadata"
_TORCH_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}


class ShardFolder:
    """A sharded checkpoint.

    Raises:
        CheckpointError: it is damaged, incomplete, or something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        self.path = Path(path)
        for name in (REST_NAME, _METADATA_NAME):
            if not (self.path / name).is_file():
                raise self._error(f"it has no file {name}")
        try:
            self.rest: dict[str, Any] = torch.load(self.path / REST_NAME, map_location="cpu", weights_only=weights_only)
        except Exception as error:
            if "Unsupported global" in str(error):
                raise  # the file is sound; torch explains which type it holds and how to allow that
            raise self._error(f"{REST_NAME} cannot be read: {type(error).__name__}: {error}") from error
        self._reader = _Reader(self.path)
        try:
            self._metadata = self._reader.read_metadata()
            described = self._metadata.state_dict_metadata
            stored = {name: entry for name, entry in described.items() if isinstance(entry, TensorStorageMetadata)}
        except Exception as error:
            raise self._error(f"{_METADATA_NAME} cannot be read: {type(error).__name__}: {error}") from error
        needed = names_in(self._apart)
        self._entries = {name: entry for name, entry in stored.items() if name in needed}
        missing = sorted(needed - self._entries.keys())
        if missing:
            raise self._error(f"the values of {', '.join(missing[:3])} ({len(missing)} in all) are missing")

    def checkpoint(self) -> dict[str, Any]:
        """All of it; tensors lie in the mapped files, so that a process reads no more than it uses.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        files = MappedFiles(self.path, self._reader._slice_file)
        tensors: dict[str, Tensor] = {}
        to_read: dict[str, Tensor] = {}
        for name, entry in self._entries.items():
            mapped = None
            if len(entry.chunks) == 1:
                try:
                    mapped = files.tensor(self._metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)])
                except Exception as error:
                    raise self._error(f"{name} cannot be read: {type(error).__name__}: {error}") from error
            if mapped is None or mapped.shape != entry.size or mapped.dtype != entry.properties.dtype:
                to_read[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                tensors[name] = mapped
        if to_read:
            tensors.update(self._read(to_read))
        return self.assembled(tensors)

    def assembled(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The checkpoint in the plain format, of all its tensors by name."""
        return {**self.rest, **put_tensors(self._apart, tensors)}

    @property
    def _apart(self) -> dict[str, Any]:
        """The entries whose tensors are stored apart."""
        return {key: self.rest[key] for key in SHARDED_ENTRIES if key in self.rest}

    def tensors(self, *, bytes_at_once: int | None) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name, read some at a time.

        Args:
            bytes_at_once: How many bytes are read before the first of them is given; None: all.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        waiting: dict[str, Tensor] = {}
        for name, entry in self._entries.items():
            waiting[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            if bytes_at_once is not None and sum(tensor.nbytes for tensor in waiting.values()) >= bytes_at_once:
                yield from self._read(waiting)
                waiting = {}
        yield from self._read(waiting)

    def _read(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(dict(tensors), storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            reasons = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
            raise self._error(reasons) from error
        yield from tensors.items()

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the folder {os.fspath(self.path)!r} is no complete sharded checkpoint: {reason}. Give another one"
        )


class _Reader(FileSystemReader):
    """Unpickles metadata of nothing but the classes that torch writes into it, and opens files of the folder only."""

    _known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is None:
            with (Path(self.path) / _METADATA_NAME).open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
                raise pickle.UnpicklingError("it does not describe a checkpoint")
            for place in metadata.storage_data.values():
                if Path(place.relative_path).name != place.relative_path:
                    raise pickle.UnpicklingError(f"it names a file elsewhere: {place.relative_path!r}")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            self._known = metadata
        return self._known


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if name in _TORCH_CLASSES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of_enum
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which metadata of a checkpoint never does")


def _member_of_enum(kind: Any, name: Any) -> Any:
    """What Python 3.11.0 to 3.11.3 write ``getattr`` for."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which metadata of a checkpoint never does")
