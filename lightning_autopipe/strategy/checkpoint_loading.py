"""Reads a checkpoint, whichever form it has: a file, or a folder of shards."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_autopipe.checkpoints.shard_reader import ShardFolder
from lightning_autopipe.core.errors import CheckpointError


def load_any(load_file: Callable[[bool | None], Any], path: _PATH, weights_only: bool | None) -> dict[str, Any]:
    """What a checkpoint holds, in the plain format.

    Args:
        load_file: Reads a file; Lightning's.
        path: Of a file or a folder.
        weights_only: Whether nothing but tensors and plain values may be in it; None: yes.

    Raises:
        CheckpointError: it is damaged, or no checkpoint of a LightningModule.
    """
    if os.path.isdir(path):
        checkpoint: Any = ShardFolder(path, weights_only=weights_only is not False).checkpoint()
    else:
        # Of an address in the network Lightning would load anything. On disk None is torch's default, which is True.
        is_remote = str(path).startswith("http")
        checkpoint = _load_file(lambda: load_file(True if is_remote and weights_only is None else weights_only), path)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{os.fspath(path)!r} is no checkpoint of a LightningModule: it has no entry 'state_dict'. Load bare "
            "weights with the module's load_state_dict before fit"
        )
    return checkpoint


def file_loader(io: CheckpointIO, path: _PATH) -> Callable[[bool | None], Any]:
    """How a checkpoint's file is read: on this machine's disks each tensor when it is used, else by Lightning's way.

    All processes read the same file, and each uses no more than its stage's part.

    Args:
        io: The Trainer's; one of the user's reads by itself.
        path: Of the file.
    """
    if type(io) is not TorchCheckpointIO or "://" in str(path) or not zipfile.is_zipfile(path):
        return lambda weights_only: io.load_checkpoint(path, weights_only=weights_only)
    return lambda weights_only: torch.load(os.fspath(path), map_location="cpu", weights_only=weights_only, mmap=True)


def _load_file(load: Callable[[], Any], path: _PATH) -> Any:
    try:
        return load()
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        if "add_safe_globals" in str(error) or "Unsupported global" in str(error):
            raise  # the file is sound; torch explains which type it holds and how to allow that
        if not isinstance(error, (EOFError, OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError)):
            raise
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)!r} cannot be read, it is damaged or no checkpoint: "
            f"{type(error).__name__}: {error}. Give another file as ckpt_path"
        ) from error
