"""Brings what is spread over ranks together, one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.checkpoints.spool import Spool
from lightning_autopipe.checkpoints.structure import put_tensors, take_tensors
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.optimizers import WholeOptimizer


class StateGatherer:
    """Brings what ranks own to global rank 0, or everywhere.

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

    def gather_tensors(self, spool: Spool | None = None) -> dict[str, Tensor]:
        """On rank 0 every parameter and buffer whose owner is another stage, by first name, in host memory; else {}.

        Collective over replica 0's pipeline.

        Args:
            spool: Keeps them instead of memory.

        Raises:
            CheckpointError: the spool has no room.
        """
        names: list[str] = []
        received: list[Tensor] = []
        for name, tensor, owner in self._owned():
            value = self._transfer(tensor, owner)
            if value is not None:
                names.append(name)
                received.append(value) if spool is None else spool.add(value)
        return dict(zip(names, received if spool is None else spool.tensors(), strict=True))

    def gather_tensors_everywhere(self) -> dict[str, Tensor]:
        """On every rank all parameters and written buffers, by first name. Collective over each pipeline."""
        return {
            name: self._communicator.broadcast_in_pipeline(
                tensor.detach().cpu() if owner == self._communicator.stage_index else None, stage_index=owner
            )
            for name, tensor, owner in self._owned()
        }

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


def gather_optimizer_states(
    optimizer: WholeOptimizer, communicator: Communicator, holder_of: Callable[[str], int], spool: Spool | None
) -> dict[int, Any]:
    """On rank 0 the state of every parameter, by its position in the whole optimizer; elsewhere this rank's own.

    Collective over all ranks.

    Args:
        optimizer: This rank's part of it.
        communicator: This rank's groups.
        holder_of: The global rank that gives the state of a parameter, by (first) name.
        spool: On rank 0: keeps, instead of memory, what comes from other ranks.

    Raises:
        CheckpointError: the spool has no room.
    """
    local = optimizer.local_states()
    names = optimizer.names
    own = {p: state for p, state in local.items() if holder_of(names[p]) == communicator.global_rank}
    others = sorted({holder_of(name) for name in names} - {0})
    if communicator.global_rank in others:
        _send_states(own, communicator)
    if communicator.global_rank != 0:
        return local
    assert spool is not None
    structures = {rank: _receive_states(rank, communicator, spool) for rank in others}
    tensors = iter(spool.tensors())
    for structure, tensor_names in structures.values():
        own.update(put_tensors(structure, {name: next(tensors) for name in tensor_names}))
    return own


def _send_states(states: Mapping[int, Any], communicator: Communicator) -> None:
    tensors: dict[str, Tensor] = {}
    structure = take_tensors(dict(states), "", tensors)
    specs = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    communicator.send_object((structure, specs), destination=0)
    for tensor in tensors.values():
        communicator.send(tensor, destination=0)


def _receive_states(rank: int, communicator: Communicator, spool: Spool) -> tuple[Any, Iterable[str]]:
    structure, specs = communicator.receive_object(source=rank)
    for _, shape, dtype in specs:
        spool.add(communicator.receive(torch.empty(shape, dtype=dtype, device="meta"), source=rank))
    return structure, [name for name, _, _ in specs]
