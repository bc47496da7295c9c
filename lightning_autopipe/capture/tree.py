"""Walking nested containers: batches, arguments and outputs of a step.

One definition of "leaf" for the whole package: lists, tuples, named tuples, mappings, dataclasses and slices are
containers; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

LeafPath = tuple[str | int, ...]


def is_container(obj: Any) -> bool:
    """Tell whether `obj` is walked into (otherwise it is a leaf)."""
    return isinstance(obj, (list, tuple, Mapping, slice)) or (
        dataclasses.is_dataclass(obj) and not isinstance(obj, type)
    )


def children(obj: Any) -> Iterator[tuple[str | int, Any]]:
    """Give the key and value of each direct child of a container."""
    if isinstance(obj, Mapping):
        yield from obj.items()
    elif isinstance(obj, slice):
        yield from (("start", obj.start), ("stop", obj.stop), ("step", obj.step))
    elif isinstance(obj, (list, tuple)):
        yield from enumerate(obj)
    else:
        for field in dataclasses.fields(obj):
            if hasattr(obj, field.name):
                yield field.name, getattr(obj, field.name)


def walk(obj: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Give every leaf with its path, in a fixed order."""
    if not is_container(obj):
        yield path, obj
        return
    for key, value in children(obj):
        yield from walk(value, (*path, key))


def tensors(obj: Any) -> Iterator[tuple[LeafPath, torch.Tensor]]:
    """Give every tensor leaf with its path."""
    for path, leaf in walk(obj):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def map_leaves(function: Callable[[LeafPath, Any], Any], obj: Any, path: LeafPath = ()) -> Any:
    """Rebuild `obj` with `function(path, leaf)` in the place of every leaf; containers keep their types."""
    if not is_container(obj):
        return function(path, obj)
    new = {key: map_leaves(function, value, (*path, key)) for key, value in children(obj)}
    return rebuild(obj, new)


def map_tensors(function: Callable[[torch.Tensor], Any], obj: Any) -> Any:
    """Rebuild `obj` with `function(tensor)` in the place of every tensor leaf."""
    return map_leaves(lambda _, leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, obj)


def get(obj: Any, path: LeafPath) -> Any:
    """Give the leaf at `path`."""
    for key in path:
        if isinstance(obj, (Mapping, list, tuple)):
            obj = obj[key]  # type: ignore[index]
        else:
            obj = getattr(obj, str(key))
    return obj


def rebuild(obj: Any, new: dict[Any, Any]) -> Any:
    """Give a container like `obj` with other children."""
    if isinstance(obj, slice):
        return slice(new["start"], new["stop"], new["step"])
    if isinstance(obj, (list, tuple)):
        values = list(new.values())
        if type(obj) is list:
            return values
        if hasattr(obj, "_fields"):  # named tuple
            return type(obj)(*values)
        return type(obj)(values)  # also torch.Size and torch.return_types
    if type(obj) is dict:
        return new
    result = copy.copy(obj)
    if isinstance(obj, Mapping):
        for key, value in new.items():
            result[key] = value
    else:
        for key, value in new.items():
            object.__setattr__(result, key, value)
    return result
