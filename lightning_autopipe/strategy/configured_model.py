"""Modules that are built in `configure_model`: each rank makes the parameters that its stage owns, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.profiling.unchanged import state_tensors
from lightning_autopipe.runtime.initial_values import InitialValues
from lightning_autopipe.runtime.placement import exchange
from lightning_autopipe.strategy.communicator import Communicator


class ConfiguredModel:
    """The parameters of a module that have no values yet, and how they will get them.

    While `configure_model` runs, large tensors are not made. Which rank makes which parameters is known when the module
    has been planned, at the first batch; until then they are placeholders, and what loads a checkpoint, converts the
    module or makes optimizers is recorded, too.
    """

    def __init__(self) -> None:
        self._values = InitialValues()

    @property
    def is_pending(self) -> bool:
        """Whether some parameters have no values yet."""
        return not self._values.is_empty

    def has_values_for(self, module: nn.Module) -> bool:
        """Whether this rank has, or can make, every parameter of the module."""
        return all(not is_absent(p) or self._values.knows(p) for p in module.parameters())

    def has_to_make(self, tensor: Tensor) -> bool:
        """Whether this is a tensor that has no values yet."""
        return self._values.knows(tensor)

    @contextlib.contextmanager
    def building(self, module: nn.Module, communicator: Communicator) -> Iterator[None]:
        """A context for `configure_model`. Collective over all ranks: they draw as global rank 0 does."""
        own = _collect_rng_states()
        first = communicator.broadcast_in_world(own)
        _set_rng_states(first)
        with self._values.recording():
            yield
        if not _is_same_state(own["torch"], first["torch"]):
            _set_rng_states(own)
        self._make([tensor for tensor in state_tensors(module) if self._values.knows(tensor)])
        if not any(map(self._values.knows, module.parameters())):
            self._values.forget()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context for what reads or writes parameters before the first batch."""
        with self._values.recording() if self.is_pending else contextlib.nullcontext():
            yield

    def values(self, module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
        """The first values of those of these parameters that have none yet."""
        pending = {name: p for name, p in module.named_parameters() if name in names and self._values.knows(p)}
        return dict(zip(pending, self._values.compute(list(pending.values())), strict=True))

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Make what optimizers keep of the parameters that are here now, and forget how all others were to be made."""
        kept = [item for optimizer in optimizers for item in optimizer.state.items() if not is_absent(item[0])]
        states: list[dict[str, Any]] = [state for _, state in kept]
        for state in states:
            pending = {key: value for key, value in state.items() if self._values.knows(value)}
            state.update(zip(pending, self._values.compute(list(pending.values())), strict=True))
        self._values.forget()

    def _make(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors that are no parameters their values, in place."""
        for tensor, value in zip(tensors, self._values.compute(tensors), strict=True):
            exchange(tensor, value)


def _is_same_state(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).all())
