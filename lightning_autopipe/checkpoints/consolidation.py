"""Makes one file of a folder of shards."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_autopipe.checkpoints.files import write_file
from lightning_autopipe.checkpoints.shard_reader import ShardFolder
from lightning_autopipe.checkpoints.spool import Spool
from lightning_autopipe.core.errors import CheckpointError, ConfigurationError

_BYTES_AT_ONCE = 256 * 2**20


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Writes a sharded checkpoint as one file in the plain format, without holding all of it in memory.

    Raises:
        CheckpointError: the folder is damaged, or the file cannot be written.
        ConfigurationError: there is no such folder, or the file is there already.
    """
    target = Path(file)
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{os.fspath(folder)!r} is not a folder; give that of a sharded checkpoint")
    if os.path.lexists(target):
        raise ConfigurationError(f"{os.fspath(target)!r} is there already; name a new file")
    shards = ShardFolder(folder)
    if "state_dict" not in shards.rest:
        raise CheckpointError(f"the folder {os.fspath(folder)!r} holds no checkpoint of a LightningModule")
    spool = Spool([target.absolute().parent])
    names = []
    for name, tensor in shards.tensors(bytes_at_once=_BYTES_AT_ONCE):
        spool.add(tensor)
        names.append(name)
    write_file(shards.assembled(dict(zip(names, spool.tensors(), strict=True))), target)
