"""Random generators that data loaders, samplers and datasets have of their own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

_MAX_ITEMS = 64
"""Containers with more members hold samples, not generators."""


@contextlib.contextmanager
def preserved_generators(owners: Sequence[Any]) -> Iterator[None]:
    """What is drawn inside from generators of these loaders, their samplers and datasets is drawn again afterwards."""
    undo = [restore for owner in owners for restore in _states(owner, set())]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _states(value: Any, seen: set[int]) -> Iterator[Callable[[], Any]]:
    """For each generator in reach what puts its present state back."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator):
        state = value.get_state()
        yield lambda: value.set_state(state)
    elif isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        numpy_state = bits.state
        yield lambda: setattr(bits, "state", numpy_state)
    elif isinstance(value, np.random.RandomState):
        legacy_state = value.get_state()
        yield lambda: value.set_state(legacy_state)
    elif isinstance(value, random.Random):
        python_state = value.getstate()
        yield lambda: value.setstate(python_state)
    elif isinstance(value, (list, tuple)) and len(value) <= _MAX_ITEMS:
        for item in value:
            yield from _states(item, seen)
    elif isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
        for item in value.values():
            yield from _states(item, seen)
    elif _has_parts(value):
        for item in list(vars(value).values()):
            yield from _states(item, seen)


def _has_parts(value: Any) -> bool:
    """Whether a value is an object such as a loader, a dataset or its transform, whose attributes are worth a look."""
    if isinstance(value, (type, ModuleType, torch.Tensor, pl.Trainer)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _OPAQUE


_OPAQUE = frozenset({"builtins", "functools", "logging", "multiprocessing", "threading", "types", "weakref"})
