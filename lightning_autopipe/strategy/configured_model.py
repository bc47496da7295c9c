"""Modules that are built in `configure_model`: each rank makes the parameters that its stage owns, and no others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.profiling.unchanged import state_tensors
from lightning_autopipe.runtime.initial_values import InitialValues
from lightning_autopipe.runtime.mapped_files import in_mapped_files
from lightning_autopipe.runtime.placement import assign_parameter, exchange
from lightning_autopipe.runtime.recorded_calls import SMALL
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
    def building(self, module: nn.Module, communicator: Communicator) -> Iterator[list[nn.Module]]:
        """A context for `configure_model`. Collective over all ranks: they draw as global rank 0 does.

        It gives a list of what is built, to which copies of the module are added.
        """
        built = [module]
        own = _collect_rng_states()
        first = communicator.broadcast_in_world(own)
        _set_rng_states(first)
        with self._values.recording():
            yield built
        if not _is_same_state(own["torch"], first["torch"]):
            _set_rng_states(own)
        for one in built:
            self._make([tensor for tensor in state_tensors(one) if self._values.knows(tensor)])
        self._leave_in_files(module)
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

    def _leave_in_files(self, module: nn.Module) -> None:
        """Lets parameters that a library has mapped from a file be read by the ranks that keep them, and no others."""
        mapped = [parameter for parameter in in_mapped_files(module.parameters()) if parameter.numel() >= SMALL]
        uses = Counter(map(_memory_of, mapped))
        # What lies in the same memory must go on doing so.
        taken = {id(p): self._values.take_over(p) for p in mapped if uses[_memory_of(p)] == 1}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) in taken:
                assign_parameter(module, name, taken[id(parameter)])

    def _make(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors that are no parameters their values, in place."""
        for tensor, value in zip(tensors, self._values.compute(tensors), strict=True):
            exchange(tensor, value)


def _is_same_state(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).all())


def _memory_of(parameter: nn.Parameter) -> int:
    return parameter.untyped_storage().data_ptr()
