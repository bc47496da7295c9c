"""Writes files whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lightning_autopipe.core.errors import ConfigurationError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that no reader ever sees half of it; makes its folder where it is missing.

    Raises:
        ConfigurationError: the file cannot be written; what was there before is untouched.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise ConfigurationError(f"{target}: cannot be written: {error.strerror or error}") from error
        raise
