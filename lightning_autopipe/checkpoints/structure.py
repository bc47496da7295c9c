"""Nested state without its tensors, which go their own way under names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TENSOR = "autopipe_tensor"


def stands_for(name: str) -> dict[str, str]:
    """What takes the place of a tensor: plain, so that a file of it loads with `weights_only`."""
    return {_TENSOR: name}


def is_plain(value: object) -> bool:
    """Whether a value is a tensor with numbers of its own in plain memory; what is special pickles itself."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def take_tensors(value: Any, name: str, taken: dict[str, Tensor]) -> Any:
    """Gives a value without its plain tensors, which are added to `taken` by where they were."""
    if is_plain(value):
        taken[name] = value.detach()
        return stands_for(name)
    if type(value) is dict:
        return {key: take_tensors(entry, f"{name}.{key}", taken) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(take_tensors(entry, f"{name}.{index}", taken) for index, entry in enumerate(value))
    return value


def put_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undoes `take_tensors`.

    Raises:
        KeyError: a tensor is missing.
    """
    if type(value) is dict:
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: put_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(put_tensors(entry, tensors) for entry in value)
    return value


def names_in(value: Any) -> set[str]:
    """The names of all tensors that are to be put back."""
    if type(value) is dict:
        if value.keys() == {_TENSOR}:
            return {value[_TENSOR]}
        return set().union(*(names_in(entry) for entry in value.values()))
    if type(value) in (list, tuple):
        return set().union(*(names_in(entry) for entry in value))
    return set()
