"""Checkpoints in the plain format, in one file that global rank 0 writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_autopipe.checkpoints.files import write_file
from lightning_autopipe.checkpoints.spool import Spool
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.optimizers import WholeOptimizer
from lightning_autopipe.strategy.placed_module import PlacedModule
from lightning_autopipe.strategy.state_gathering import gather_optimizer_states, whole_state_dict


class ConsolidatedCheckpoints:
    """A plain module's keys and a plain optimizer's layout.

    What other ranks own comes to rank 0 one tensor at a time, and waits there on disk: `torch.save`, and hooks that
    look into the checkpoint, get views of it.

    Args:
        communicator: This rank's groups.
        spool_folders: Where it waits, if a file can be made there.
    """

    def __init__(self, communicator: Communicator, spool_folders: Sequence[Path]) -> None:
        self.communicator = communicator
        self._spool_folders = spool_folders

    def module_state(self, placed: PlacedModule) -> dict[str, Any]:
        """The plain module's ``state_dict``; on rank 0 with all values. Collective over all ranks."""
        received = placed.gatherer.gather_tensors(self._spool()) if placed.is_placed else {}
        return whole_state_dict(placed.module, received)

    def optimizer_state(self, placed: PlacedModule, whole: WholeOptimizer) -> dict[str, Any]:
        """The whole optimizer's ``state_dict``; complete on rank 0. Collective over all ranks."""
        if not placed.is_spread:
            return whole.state_dict(whole.local_states())
        states = gather_optimizer_states(whole, self.communicator, placed.optimizer_state_holder, self._spool())
        return whole.state_dict(states)

    def save(
        self, checkpoint: dict[str, Any], path: _PATH, io: CheckpointIO, storage_options: Any | None = None
    ) -> None:
        """Writes the file, on rank 0.

        A remote path, or a ``CheckpointIO`` of the user's, is left to that.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        if self.communicator.global_rank != 0:
            return
        if type(io) is not TorchCheckpointIO or "://" in str(path) or storage_options is not None:
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            write_file(checkpoint, path)

    def remove(self, path: _PATH, io: CheckpointIO) -> None:
        """Removes a checkpoint of either form, on rank 0."""
        if self.communicator.global_rank == 0:
            io.remove_checkpoint(path)

    def wait(self) -> None:
        """Nothing is written in the background."""

    def _spool(self) -> Spool | None:
        return Spool(self._spool_folders) if self.communicator.global_rank == 0 else None
