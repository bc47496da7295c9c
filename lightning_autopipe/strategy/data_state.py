"""What data loaders, samplers and datasets have of their own: random generators, counters, lists."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
    undo = list(_states(owners))
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _states(owners: Sequence[Any]) -> Iterator[Callable[[], Any]]:
    """For everything in reach what puts its present state back."""
    waiting = deque(owners)
    seen: set[int] = set()
    while waiting:  # and not by recursion: chains of objects may be long
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        restore, parts = _state(value)
        waiting.extend(parts)
        if restore is not None:
            yield restore


def _state(value: Any) -> tuple[Callable[[], Any] | None, Iterable[Any]]:
    """What puts one value's state back, if it has any, and its parts."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state()), ()
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return partial(setattr, bits, "state", bits.state), ()
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state()), ()
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate()), ()
    if isinstance(value, (list, tuple)) and len(value) <= _MAX_ITEMS:
        items = list(value)
        return partial(value.__setitem__, slice(None), items) if isinstance(value, list) else None, items
    if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
        entries = dict(value)
        return partial(_put_back, value, entries) if type(value) is dict else None, entries.values()
    if _has_parts(value):
        attributes = dict(vars(value))
        # Not by setattr: loaders refuse some.
        return partial(_put_back, vars(value), attributes), attributes.values()
    return None, ()


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
