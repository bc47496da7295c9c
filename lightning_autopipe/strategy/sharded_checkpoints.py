"""Checkpoints as folders that all ranks write at once, by torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.checkpoints.placing import cannot_write, partial_path, remove
from lightning_autopipe.checkpoints.shard_writer import SHARDED_ENTRIES, ShardWriter
from lightning_autopipe.checkpoints.structure import is_plain, names_in, stands_for, take_tensors
from lightning_autopipe.core.errors import CheckpointError, ConfigurationError
from lightning_autopipe.runtime.process_groups import groups_of
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.optimizers import WholeOptimizer
from lightning_autopipe.strategy.placed_module import PlacedModule, StatePlace
from lightning_autopipe.strategy.pruning import name_under_mask
from lightning_autopipe.strategy.state_gathering import whole_state_dict


class ShardedCheckpoints:
    """Each rank writes a share of its stage's parameters, with their optimizer state; rank 0 writes the rest.

    Args:
        communicator: This rank's groups.
        in_background: Whether steps go on while files are written, from a copy in host memory; not with one process.
        timeout_s: How long a rank waits for another one.
        backend: Of this run's groups.
    """

    def __init__(
        self, communicator: Communicator, *, in_background: bool, timeout_s: float, backend: str | None
    ) -> None:
        self.communicator = communicator
        self._in_background = in_background
        self._timeout_s = timeout_s
        self._backend = backend
        self._placed: PlacedModule | None = None
        self._places: Mapping[str, StatePlace] = {}
        self._pending: tuple[Future[Any], Path] | None = None
        self._to_remove: list[Path] = []

    def module_state(self, placed: PlacedModule) -> dict[str, Any]:
        """The plain module's ``state_dict`` with this rank's values."""
        self._placed, self._places = placed, placed.state_places()
        return whole_state_dict(placed.module, {})

    def optimizer_state(self, placed: PlacedModule, whole: WholeOptimizer) -> dict[str, Any]:
        """The whole optimizer's ``state_dict`` with this rank's state."""
        return whole.state_dict(whole.local_states())

    def save(
        self, checkpoint: dict[str, Any], path: _PATH, io: CheckpointIO, storage_options: Any | None = None
    ) -> None:
        """Writes the folder; in the background it is there after `wait`. Collective over all ranks.

        Raises:
            CheckpointError: it cannot be written, or the one before could not.
            ConfigurationError: it would have to go through the user's ``CheckpointIO``.
        """
        self.wait()
        target = self._agreed(path, io, storage_options)
        tensors: dict[str, Tensor] = {}
        rest = self._without_tensors(checkpoint, tensors)
        names = names_in([rest.get(entry) for entry in SHARDED_ENTRIES])
        content = _as_bytes(rest) if self.communicator.global_rank == 0 else b""
        partial = self._prepared(target)
        writer = ShardWriter(partial, target, rest=content, names=names if content else ())
        is_alone = self.communicator.world_group is None
        options: dict[str, Any] = {"storage_writer": writer, "process_group": self._own_group(), "no_dist": is_alone}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            if self._in_background and not is_alone:
                future: Any = async_save(tensors, **options)
                self._pending = (future, target)
            else:
                with self._explaining(target):
                    save(tensors, **options)

    def remove(self, path: _PATH, io: CheckpointIO) -> None:
        """Removes a checkpoint of either form, on rank 0; not before what is being written is complete."""
        if self.communicator.global_rank != 0:
            return
        if self._pending is not None:
            self._to_remove.append(Path(path))
        else:
            io.remove_checkpoint(path)

    def wait(self) -> None:
        """Waits for what is being written in the background. Collective over all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is None:
            return
        (future, target), self._pending = self._pending, None
        replaced, self._to_remove = self._to_remove, []
        with self._explaining(target):
            future.result()
        for path in replaced:
            remove(path)

    def _agreed(self, path: _PATH, io: CheckpointIO, storage_options: Any | None) -> Path:
        """The folder, as rank 0 calls it."""
        if type(io) is not TorchCheckpointIO or "://" in str(path) or storage_options is not None:
            raise ConfigurationError(
                f"checkpoint_format={'sharded_async' if self._in_background else 'sharded'!r} writes a folder that all "
                f"processes see, without a CheckpointIO (here {type(io).__name__}) or storage options; got "
                f"{os.fspath(path)!r}. Set checkpoint_format='consolidated'"
            )
        return Path(self.communicator.broadcast_in_world(os.path.abspath(path)))

    def _prepared(self, target: Path) -> Path:
        """The empty folder to write to, there for all ranks."""
        partial = partial_path(target)
        problem: str | None = None
        if self.communicator.global_rank == 0:
            try:
                remove(partial)
                partial.mkdir(parents=True)
            except OSError as error:
                problem = str(cannot_write(target, error))
        problem = self.communicator.broadcast_in_world(problem)
        if problem is not None:
            raise CheckpointError(problem)
        seen = self.communicator.gather_in_world(partial.is_dir())
        if not all(seen):
            if self.communicator.global_rank == 0:
                remove(partial)
            raise CheckpointError(
                f"the folder of {os.fspath(target)!r} is not the same for all processes (rank {seen.index(False)} does "
                "not see it): sharded checkpoints need a file system that all machines share. Set another folder, or "
                "checkpoint_format='consolidated'"
            )
        return partial

    def _without_tensors(self, checkpoint: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The checkpoint with names in the place of tensors, complete on rank 0; those of this rank are added."""
        rest = dict(checkpoint)
        rest["state_dict"] = {
            key: self._module_entry(key, value, tensors) for key, value in checkpoint["state_dict"].items()
        }
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = self._optimizer_entries(checkpoint["optimizer_states"], tensors)
        return rest

    def _module_entry(self, key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
        if not (is_plain(value) or is_absent(value)):
            return value
        place = self._places.get(key)
        if place is None:  # pruned for good in the checkpoint alone: it lies where the parameter under its mask does
            masked = self._places.get(name_under_mask(key))
            place = StatePlace(0 if masked is None else masked.global_rank, key)
        name = f"state_dict.{place.stored_name}"
        if place.global_rank == self.communicator.global_rank and not is_absent(value):
            tensors[name] = value.detach()
        return stands_for(name)

    def _optimizer_entries(self, optimizer_states: Any, tensors: dict[str, Tensor]) -> list[Any]:
        assert self._placed is not None
        own: list[Any] = []
        for index, state in enumerate(optimizer_states):
            held = self._placed.held_states(index, state["state"])
            own.append(take_tensors(held, f"optimizer_states.{index}.state", tensors))
        by_rank = self.communicator.gather_in_world(own)
        return [
            {**state, "state": dict(sorted(entry for of_rank in by_rank for entry in of_rank[index].items()))}
            for index, state in enumerate(optimizer_states)
        ]

    def _own_group(self) -> dist.ProcessGroup | None:
        """A group for what is written in the background, while the other groups are in use."""
        if self.communicator.world_group is None:
            return None
        layout, timeout_s = self.communicator.layout, self._timeout_s
        cache = groups_of(layout, timeout_s=timeout_s, backend=self._backend)

        def make() -> dist.ProcessGroup:
            return cache.new_group(range(layout.world_size), timeout_s=timeout_s, backend="gloo", what="checkpoints")

        return cache.once("checkpoints", make)

    @contextlib.contextmanager
    def _explaining(self, target: Path) -> Any:
        """Raises on all ranks what kept one of them from writing, and removes what was written."""
        try:
            yield
        except CheckpointException as error:
            if self.communicator.global_rank == 0:
                with contextlib.suppress(OSError):
                    remove(partial_path(target))
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, CheckpointError):
                raise cause from error
            raise cannot_write(target, cause, f" by rank {rank}") from error


def _as_bytes(rest: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(rest, file)
    return file.getvalue()
