"""Attributes of the module in which steps keep something: lists of predictions, sums, last values.

A step's end runs on the last stage alone, so ``self.predictions.append(y)`` fills a list there and nowhere else. At the
end of an epoch, before its hooks, the last stage of each pipeline tells the others what its steps have left: hooks such
as ``on_validation_epoch_end`` then see the same on all stages.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor

from lightning_autopipe.core.errors import BatchError
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.message import pack, unpack

_NUMBERS = (bool, int, float, complex, str, type(None), np.ndarray, np.generic)
_CONTAINERS = (list, tuple, dict, set, deque)
_MAX_ENTRIES = 64
"""Mappings with more entries are looked at as a whole only."""


class StepAttributes:
    """Notes which of a module's own attributes its steps change, and shares them.

    Args:
        module: The user's; attributes of its submodules belong to their stages.
        communicator: This rank's groups.
    """

    def __init__(self, module: pl.LightningModule, communicator: Communicator) -> None:
        self._module = module
        self._communicator = communicator
        self._lightnings_own = frozenset(vars(pl.LightningModule()))
        self._changed: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which a step runs for real."""
        if not self._communicator.is_last_stage or self._communicator.layout.num_stages == 1:
            yield
            return
        before = self._marks()
        yield
        for name, mark in self._marks().items():
            if name not in before or not _is_same(before[name], mark):
                self._changed.add(name)

    def share(self) -> None:
        """Gives all stages what steps have left on the last one. Collective over each pipeline."""
        communicator = self._communicator
        last = communicator.layout.num_stages - 1
        if communicator.is_last_stage:
            communicator.broadcast_in_pipeline(self._packed(), stage_index=last)
            return
        for name, message in communicator.broadcast_in_pipeline(None, stage_index=last).items():
            _put(vars(self._module), name, unpack(message, communicator.device))

    def _marks(self) -> dict[str, Any]:
        return {
            name: _mark(value)
            for name, value in vars(self._module).items()
            if name not in self._changed
            and name not in self._lightnings_own
            and isinstance(value, (Tensor, *_NUMBERS, *_CONTAINERS))
        }

    def _packed(self) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        for name in self._changed & vars(self._module).keys():
            # What cannot travel, or holds a value of another stage, stays each stage's own.
            with contextlib.suppress(BatchError):
                packed[name] = pack(_portable(getattr(self._module, name)))
        return packed


def _mark(value: Any, *, is_inner: bool = False) -> tuple[Any, ...]:
    """What tells whether a value is changed, at a cost that does not grow with it; holds on to it."""
    if isinstance(value, Tensor):
        # Those that were made in inference mode count no versions.
        return value, None if value.is_inference() else value._version
    if isinstance(value, (list, deque)):
        return value, len(value), value[-1] if value else None
    if isinstance(value, dict) and not is_inner and len(value) <= _MAX_ENTRIES:
        return value, len(value), *(part for entry in value.values() for part in _mark(entry, is_inner=True))
    return value, len(value) if isinstance(value, _CONTAINERS) else None


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(one, other, strict=True)
    )


def _portable(value: Any) -> Any:
    """The same in plain containers, apart from its graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _portable(entry) for key, entry in value.items()}
    if isinstance(value, (list, deque)):
        return [_portable(entry) for entry in value]
    if type(value) is tuple:
        return tuple(_portable(entry) for entry in value)
    return value


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """In place, where others may hold the container, or it is of a kind of its own."""
    present = attributes.get(name)
    if isinstance(present, (list, deque)) and isinstance(value, list):
        present.clear()
        present.extend(value)
    elif isinstance(present, dict) and isinstance(value, dict):
        present.clear()
        present.update(value)
    else:
        attributes[name] = value
