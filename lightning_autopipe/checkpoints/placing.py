"""Writes a file or folder under another name beside its own, and puts it in its place when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_autopipe.core.errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def partial_path(target: Path) -> Path:
    """Where a checkpoint is written until it is complete. The same at each try, so that none are left to add up."""
    return target.with_name(f".{target.name}.partial")


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Gives the path to write to; at the end what is there takes the target's place, after an error it is removed.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written to.
    """
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        yield partial
        put_in_place(partial, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(partial)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from error
        raise


def cannot_write(target: Path, error: BaseException, place: str = "") -> CheckpointError:
    """What to raise where a checkpoint cannot be written."""
    message = f"the checkpoint {os.fspath(target)!r} cannot be written{place}, and what was there before is untouched: "
    if not isinstance(error, OSError):
        return CheckpointError(f"{message}{type(error).__name__}: {error}")
    return CheckpointError(
        f"{message}{error.strerror or error}. Make room, or set another folder (ModelCheckpoint's dirpath, or the path "
        "given to save_checkpoint)"
    )


def put_in_place(new: Path, target: Path) -> None:
    """Makes a complete file or folder what is found under a name, whatever was there, and only then removes that."""
    try:
        os.replace(new, target)
    except OSError:
        if not os.path.lexists(target):
            raise
        # A folder cannot be renamed to one that is not empty, nor to a file or link.
        previous = _exchanged(new, target)
        sync_folder(target.parent)
        remove(previous)
    sync_folder(target.parent)


def _exchanged(new: Path, target: Path) -> Path:
    """Gives two names each other's content; where what was the target is now."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None), "renameat2", None)
        if (
            rename is not None
            and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0
        ):
            return new
    # Some network file systems cannot exchange: for a moment there is nothing under the name.
    previous = target.with_name(f".{target.name}.previous")
    remove(previous)
    os.rename(target, previous)
    os.rename(new, target)
    return previous


def remove(path: Path) -> None:
    """Removes a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
