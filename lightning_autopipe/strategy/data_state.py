"""What data loaders, samplers and datasets have of their own: random generators, counters, lists."""

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
def preserved_data_state(owners: Sequence[Any]) -> Iterator[None]:
    """What these loaders, their samplers and datasets draw, count or note inside is as before afterwards.

    Put back are generators, attributes, and the members of short lists and mappings; not what tensors and arrays hold.
    """
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
        items = list(value)
        for item in items:
            yield from _states(item, seen)
        if isinstance(value, list):
            yield lambda: value.__setitem__(slice(None), items)
    elif isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
        entries = dict(value)
        for item in entries.values():
            yield from _states(item, seen)
        if type(value) is dict:
            yield lambda: _put_back(value, entries)
    elif _has_parts(value):
        attributes = dict(vars(value))
        for item in attributes.values():
            yield from _states(item, seen)
        # Not by setattr: loaders refuse some.
        yield lambda: _put_back(vars(value), attributes)


def _put_back(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in entries.keys() - before.keys():
        del entries[name]
    for name, value in before.items():
        if name not in entries or entries[name] is not value:
            entries[name] = value


def _has_parts(value: Any) -> bool:
    """Whether a value is an object such as a loader, a dataset or its transform, whose attributes are worth a look."""
    if isinstance(value, (type, ModuleType, torch.Tensor, pl.Trainer)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _OPAQUE


_OPAQUE = frozenset({"builtins", "functools", "logging", "multiprocessing", "threading", "types", "weakref"})
