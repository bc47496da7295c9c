"""A module and its optimizers on one rank: whole or its own part, on its device or in host memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch import Tensor
from torch.optim import Optimizer

from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.strategy.checkpoint import StateGatherer
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.optimizers import WholeOptimizer
from lightning_autopipe.strategy.placement import broadcast_tensors, move_module


class PlacedModule:
    """Places a planned module, and brings what is apart together again.

    Args:
        module: The user's.
        pipeline: Knows what this rank owns.
        communicator: This rank's groups.
        device: Where this rank computes.
    """

    def __init__(
        self, module: pl.LightningModule, pipeline: Pipeline, communicator: Communicator, device: torch.device
    ) -> None:
        self.is_placed = False
        """Whether some rank has placeholders. Rank 0 may be whole all the same, after a fit."""
        self.optimizers: list[WholeOptimizer] = []
        self._module = module
        self._pipeline = pipeline
        self._communicator = communicator
        self._device = device

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Notes what the optimizers of a fit look like on the whole module.

        Raises:
            ConfigurationError: one of them cannot work on stages.
        """
        self.optimizers = [WholeOptimizer(optimizer, self._module) for optimizer in optimizers]
        if self.is_placed:
            self._prune_optimizers()

    def place(self) -> None:
        """Leaves this rank its own part of the planned module, on its device. Collective over all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.is_placed:
                # Processes that were not seeded alike have built different modules.
                tensors = (*self._module.parameters(), *self._module.buffers())
                broadcast_tensors(tensors, self._communicator.world_group, source=0)
            self._pipeline.place()
            self.is_placed = self._communicator.layout.num_stages > 1
            self._prune_optimizers()
            self._move_to(self._device)

    def leave_device(self) -> None:
        """Moves everything to host memory; `place` moves it back."""
        self._move_to(torch.device("cpu"))

    def _move_to(self, device: torch.device) -> None:
        move_module(self._module, device)
        _optimizers_to_device([whole.optimizer for whole in self.optimizers], device)

    def _prune_optimizers(self) -> None:
        owned = self._pipeline.ownership.owned_parameters(self._communicator.stage_index)
        for whole in self.optimizers:
            whole.prune(owned.__contains__)

    @property
    def gatherer(self) -> StateGatherer:
        """Brings the stages' state to rank 0."""
        ownership = self._pipeline.ownership
        owners = {
            name: stage
            for stage in reversed(range(self._communicator.layout.num_stages))
            for name in ownership.owned_buffers(stage)
        }
        return StateGatherer(
            self._module, self._communicator, parameter_owner=ownership.parameter_owner, buffer_owner=owners.get
        )

    def gather_on_rank_zero(self) -> None:
        """Makes the module whole on global rank 0. Collective over replica 0's pipeline."""
        if self.is_placed:
            self._fill(self.gatherer.gather_tensors())

    def gather_everywhere(self) -> None:
        """Makes the module whole on every rank. Collective over each pipeline."""
        if not self.is_placed:
            return
        self._fill(self.gatherer.gather_tensors_everywhere())
        self.is_placed = False

    def sync_written_buffers(self) -> None:
        """Gives every replica the buffers that replica 0's steps have written (running statistics)."""
        stage_index = self._communicator.stage_index
        written = self._pipeline.ownership.owned_buffers(stage_index)
        broadcast_tensors(
            [buffer for name, buffer in self._module.named_buffers() if name in written],
            self._communicator.replica_group,
            source=self._communicator.layout.global_rank(stage_index, 0),
        )

    def _fill(self, values: dict[str, Tensor]) -> None:
        # Traces hold on to placeholders, and what is in use gets a new object: the first call lets go of them.
        self._pipeline.restore({})
        gc.collect()
        self._pipeline.restore(values)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in values:
                    buffer.copy_(values[name])
