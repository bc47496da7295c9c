"""Checkpoints in the plain format: a plain module's keys and a plain optimizer's layout, in one file.

A file loads into the LightningModule without this package, and resumes under any number of stages.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn

from lightning_autopipe.core.errors import CheckpointError
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.optimizers import WholeOptimizer


class StateGatherer:
    """Brings what the stages of replica 0 own to global rank 0. Collective over replica 0's pipeline.

    Args:
        module: The module; other stages' parameters are placeholders.
        communicator: This rank's groups.
        parameter_owner: The stage that a (first) parameter name is taken from.
        buffer_owner: The stage that a buffer is taken from; None for one that is equal everywhere.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        *,
        parameter_owner: Callable[[str], int],
        buffer_owner: Callable[[str], int | None],
    ) -> None:
        self._module = module
        self._communicator = communicator
        self._parameter_owner = parameter_owner
        self._buffer_owner = buffer_owner
        self._receiver_stage = communicator.layout.num_stages - 1

    def gather_tensors(self) -> dict[str, Tensor]:
        """On rank 0 every parameter and buffer whose owner is another stage, by first name, in host memory; else {}."""
        received: dict[str, Tensor] = {}
        for name, tensor, owner in self._owned():
            value = self._transfer(tensor, owner)
            if value is not None:
                received[name] = value
        return received

    def gather_tensors_everywhere(self) -> dict[str, Tensor]:
        """On every rank all parameters and written buffers, by first name. Collective over each pipeline."""
        return {
            name: self._communicator.broadcast_in_pipeline(
                tensor.detach().cpu() if owner == self._communicator.stage_index else None, stage_index=owner
            )
            for name, tensor, owner in self._owned()
        }

    def gather_optimizer_states(self, optimizer: WholeOptimizer) -> dict[int, Any]:
        """On rank 0 the state of every parameter, by its position in the whole optimizer; elsewhere this rank's own."""
        local = optimizer.local_states()
        if self._communicator.replica_index != 0:
            return local
        names = optimizer.names
        # A tied parameter's state is the same on all its holders; its owner gives it.
        owned = {p: s for p, s in local.items() if self._parameter_owner(names[p]) == self._communicator.stage_index}
        if self._communicator.stage_index != self._receiver_stage:
            self._communicator.send_object(owned, destination=0)
            return local
        for stage_index in range(self._receiver_stage):
            owned.update(
                self._communicator.receive_object(source=self._communicator.layout.global_rank(stage_index, 0))
            )
        return owned

    def _owned(self) -> Iterator[tuple[str, Tensor, int]]:
        """All tensors that stages own, in one order on all ranks."""
        for name, parameter in self._module.named_parameters():
            yield name, parameter, self._parameter_owner(name)
        for name, buffer in self._module.named_buffers():
            owner = self._buffer_owner(name)
            if owner is not None:
                yield name, buffer, owner

    def _transfer(self, tensor: Tensor, owner: int) -> Tensor | None:
        communicator = self._communicator
        if communicator.replica_index != 0 or owner == self._receiver_stage:
            return None
        if communicator.stage_index == owner:
            communicator.send(tensor, destination=0)
        elif communicator.stage_index == self._receiver_stage:
            return communicator.receive(tensor, source=communicator.layout.global_rank(owner, 0))
        return None


def whole_state_dict(module: nn.Module, received: Mapping[str, Tensor]) -> dict[str, Any]:
    """The module's ``state_dict`` with received values in the places of parameters and buffers that other stages own.

    Where nothing was received (on ranks that do not write the file) those places hold placeholders: keys are complete.
    """
    # With keep_vars the values are the parameters themselves, also under keys that a user's state_dict has changed.
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    replacement = {
        id(tensor): received[name]
        for named in (module.named_parameters(), module.named_buffers())
        for name, tensor in named
        if name in received
    }
    return {
        key: replacement.get(id(value), value.detach()) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def save_atomically(
    checkpoint: dict[str, Any], path: _PATH, io: CheckpointIO, storage_options: Any | None = None
) -> None:
    """Writes a file under a temporary name beside its own, then renames it: whole or not at all.

    A remote path, or a ``CheckpointIO`` of the user's, is left to that.
    """
    is_local = "://" not in str(path)
    if type(io) is not TorchCheckpointIO or not is_local or storage_options is not None:
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    try:
        io.save_checkpoint(checkpoint, temporary)
        # mkstemp makes files that nobody else may read.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_checked(load: Callable[[], Any], path: _PATH) -> dict[str, Any]:
    """What a checkpoint file holds.

    Raises:
        CheckpointError: the file is damaged, or no checkpoint of a LightningModule.
    """
    try:
        checkpoint = load()
    except (FileNotFoundError, PermissionError, IsADirectoryError):
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
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"the file {os.fspath(path)!r} is no checkpoint of a LightningModule: it has no entry 'state_dict'. Load "
            "bare weights with the module's load_state_dict before fit"
        )
    return checkpoint
