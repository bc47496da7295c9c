"""A module and its optimizers on one rank: whole or its own part, on its device or in host memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.placement import fill_parameters
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.configured_model import ConfiguredModel
from lightning_autopipe.strategy.optimizer_sharding import ShardedStep
from lightning_autopipe.strategy.optimizers import WholeOptimizer
from lightning_autopipe.strategy.parameter_shares import ParameterShares
from lightning_autopipe.strategy.placement import broadcast_tensors, move_module
from lightning_autopipe.strategy.state_gathering import StateGatherer


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where an entry of a ``state_dict`` comes from."""

    global_rank: int
    stored_name: str
    """The first of the keys under which the same tensor is found."""


class PlacedModule:
    """Places a planned module, and brings what is apart together again.

    Args:
        module: The user's.
        pipeline: Knows what this rank owns.
        communicator: This rank's groups.
        device: Where this rank computes.
        configured: What of the module has no values yet.
        sharing_group: The ranks of this stage, which share its optimizer state; None: each keeps all of it.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        communicator: Communicator,
        device: torch.device,
        configured: ConfiguredModel,
        *,
        sharing_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.is_placed = False
        """Whether some rank has placeholders. Rank 0 may be whole all the same, after a fit."""
        self.optimizers: list[WholeOptimizer] = []
        self.module = module
        """The user's."""
        self._sharing_group = sharing_group
        self._sharded_steps: list[ShardedStep] = []
        self.copies: list[nn.Module] = []
        """Of the module, with values of their own (averages): they are apart and whole when it is."""
        self._pipeline = pipeline
        self._communicator = communicator
        self._device = device
        self._configured = configured

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Notes what the optimizers of a fit look like on the whole module.

        Raises:
            ConfigurationError: one of them cannot work on stages.
        """
        for step in self._sharded_steps:
            step.remove()
        self.optimizers = [WholeOptimizer(optimizer, self.module) for optimizer in optimizers]
        group = self._sharing_group
        if group is not None:
            self._sharded_steps = [ShardedStep(whole, group, self._communicator.guard) for whole in self.optimizers]
        if self.is_placed:
            self._prune_optimizers()

    def place(self) -> None:
        """Leaves this rank its own part of the planned module, on its device. Collective over all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.is_placed:
                self._equalize()
            self._pipeline.place(self.copies)
            self.is_placed = self._communicator.layout.num_stages > 1
            self.make(self._owned_parameters)
            self._prune_optimizers()
            self._move_to(self._device)

    def _equalize(self) -> None:
        """Gives whole modules the values that rank 0 has: processes not seeded alike have built, or pruned, others."""
        for module in (self.module, *self.copies):
            tensors = (*module.parameters(), *module.buffers())
            here = [tensor for tensor in tensors if not self._configured.has_to_make(tensor)]
            broadcast_tensors(here, self._communicator.world_group, source=0)

    @contextlib.contextmanager
    def renaming(self) -> Iterator[None]:
        """A context in which the module, whole on every rank, may give its parameters other names. Collective."""
        before = {id(parameter): name for name, parameter in self.module.named_parameters()}
        yield
        self._equalize()
        after = {id(parameter): name for name, parameter in self.module.named_parameters()}
        names = {name: after[key] for key, name in before.items() if key in after}
        self._pipeline.ownership.rename(names)
        for whole in self.optimizers:
            whole.rename(names)

    def make(self, names: Collection[str]) -> None:
        """Gives those of these parameters, and of their copies, their first values; others will not get any here."""
        if not self._configured.is_pending:
            return
        for module in (self.module, *self.copies):
            self._fill(module, self._configured.values(module, names))
        for whole in self.optimizers:
            whole.rebind(self.module)
        self._configured.finish([whole.optimizer for whole in self.optimizers])

    def make_all(self) -> None:
        """Gives all parameters their first values that have none yet."""
        self.make([name for name, _ in self.module.named_parameters()])

    def leave_device(self) -> None:
        """Moves everything to host memory; `place` moves it back."""
        self._move_to(torch.device("cpu"))

    def _move_to(self, device: torch.device) -> None:
        move_module(self.module, device)
        _optimizers_to_device([whole.optimizer for whole in self.optimizers], device)

    def _prune_optimizers(self) -> None:
        for whole in self.optimizers:
            whole.prune(self._owned_parameters.__contains__)
        if self._sharded_steps:
            layout, stage_index = self._communicator.layout, self._communicator.stage_index
            shares = self.shares.of_stage(stage_index)
            for step in self._sharded_steps:
                step.share(
                    self.module,
                    shares,
                    source_ranks=tuple(layout.global_rank(stage_index, index) for index in range(layout.num_replicas)),
                    replica_index=self._communicator.replica_index,
                )
        for whole in self.optimizers:
            whole.leave_file()

    @property
    def is_spread(self) -> bool:
        """Whether some rank lacks optimizer state. A module that was made whole leaves its optimizers apart."""
        has_parts = self._communicator.layout.num_stages > 1 and any(whole.is_pruned for whole in self.optimizers)
        return self.is_placed or has_parts or self._sharing_group is not None

    @property
    def _owned_parameters(self) -> frozenset[str]:
        return self._pipeline.ownership.owned_parameters(self._communicator.stage_index)

    @property
    def gatherer(self) -> StateGatherer:
        """Brings the stages' tensors to rank 0."""
        return self._gatherer_of(self.module)

    def owns(self, name: str) -> bool:
        """Whether this rank's stage trains a parameter, by its first name."""
        return self._communicator.layout.num_stages == 1 or name in self._owned_parameters

    def of_claimant(self, value: Tensor, claim: int) -> Tensor | None:
        """The value that the first stage has with the largest claim, in host memory; None: all are 0. Collective."""
        claims = self._communicator.gather_in_pipeline(claim)
        if not any(claims):
            return None
        stage_index = claims.index(max(claims))
        own = value.cpu() if stage_index == self._communicator.stage_index else None
        given: Tensor = self._communicator.broadcast_in_pipeline(own, stage_index=stage_index)
        return given

    def gather_copy(self, copy: nn.Module) -> dict[str, Tensor]:
        """On global rank 0 what other stages own of one of the copies. Collective over replica 0's pipeline."""
        return self._gatherer_of(copy).gather_tensors() if self.is_placed else {}

    @property
    def _buffer_owner(self) -> Callable[[str], int | None]:
        ownership = self._pipeline.ownership
        owners = {
            name: stage
            for stage in reversed(range(self._communicator.layout.num_stages))
            for name in ownership.owned_buffers(stage)
        }
        return owners.get

    @property
    def shares(self) -> ParameterShares:
        """What each replica of a stage keeps where they share, and writes to a sharded checkpoint."""
        return ParameterShares(self.module, self._pipeline.ownership, self._communicator.layout)

    @property
    def optimizer_state_holder(self) -> Callable[[str], int]:
        """The global rank that a parameter's optimizer state is taken from, by its (first) name."""
        if self._sharing_group is not None:
            return self.shares.holder
        ownership, layout = self._pipeline.ownership, self._communicator.layout
        return lambda name: layout.global_rank(ownership.parameter_owner(name), 0)

    def state_places(self) -> dict[str, StatePlace]:
        """For each key of the module's ``state_dict`` the rank that writes it to a sharded checkpoint."""
        parameters = {id(parameter): name for name, parameter in self.module.named_parameters()}
        buffers = {id(buffer): name for name, buffer in self.module.named_buffers()}
        layout, holder, buffer_owner = self._communicator.layout, self.shares.holder, self._buffer_owner
        stored: dict[int, str] = {}
        places: dict[str, StatePlace] = {}
        for key, value in self.module.state_dict(keep_vars=True).items():
            global_rank = 0
            if id(value) in parameters:
                global_rank = holder(parameters[id(value)])
            elif id(value) in buffers:
                stage_index = buffer_owner(buffers[id(value)])
                global_rank = 0 if stage_index is None else layout.global_rank(stage_index, 0)
            places[key] = StatePlace(global_rank, stored.setdefault(id(value), key))
        return places

    def held_states(self, optimizer_index: int, states: Mapping[int, Any]) -> dict[int, Any]:
        """Those of an optimizer's states, by position, that this rank writes to a sharded checkpoint."""
        names, holder = self.optimizers[optimizer_index].names, self.shares.holder
        own = self._communicator.global_rank
        return {position: state for position, state in states.items() if holder(names[position]) == own}

    def gather_on_rank_zero(self) -> None:
        """Makes the module whole on global rank 0. Collective over replica 0's pipeline."""
        if self.is_placed:
            for module in (self.module, *self.copies):
                self._fill(module, self._gatherer_of(module).gather_tensors())

    def gather_everywhere(self) -> None:
        """Makes the module whole on every rank. Collective over each pipeline."""
        if not self.is_placed:
            return
        for module in (self.module, *self.copies):
            self._fill(module, self._gatherer_of(module).gather_tensors_everywhere())
        self.is_placed = False

    def sync_written_buffers(self) -> None:
        """Gives every replica the buffers that replica 0's steps have written (running statistics)."""
        stage_index = self._communicator.stage_index
        written = self._pipeline.ownership.owned_buffers(stage_index)
        broadcast_tensors(
            [buffer for name, buffer in self.module.named_buffers() if name in written],
            self._communicator.replica_group,
            source=self._communicator.layout.global_rank(stage_index, 0),
        )

    def _gatherer_of(self, module: nn.Module) -> StateGatherer:
        return StateGatherer(
            module,
            self._communicator,
            parameter_owner=self._pipeline.ownership.parameter_owner,
            buffer_owner=self._buffer_owner,
        )

    def _fill(self, module: nn.Module, values: dict[str, Tensor]) -> None:
        if module is self.module:
            # Traces hold on to placeholders, and what is in use gets a new object: the first call lets go of them.
            self._pipeline.restore({})
            gc.collect()
            self._pipeline.restore(values)
        else:
            fill_parameters(module, values)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in values:
                    buffer.copy_(values[name])
