"""Keeping only a stage's own parameters: the rest become placeholders without storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.absent import absent_like, computing_shapes, is_absent

T = TypeVar("T", bound=Tensor)


def release_parameters(
    module: nn.Module, keep: Collection[str], home_of: Callable[[str], str], device: torch.device
) -> None:
    """Turn every parameter not named in `keep` into a placeholder: true shape and dtype, on `device`, no storage.

    The parameter objects stay the same, so that references to them (optimizer groups, a module's own lists) stay good;
    where a weak reference forbids that (an LSTM's), the module gets a new object. A parameter with several names stays
    if one of them is in `keep`.
    """
    kept = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in keep}
    new: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in kept:
            continue
        if is_absent(parameter):
            parameter.home = home_of(name)  # type: ignore[attr-defined]
            continue
        if id(parameter) not in new:
            with torch.no_grad():
                absent = absent_like(parameter.detach().to(device="meta"), home_of(name), device)
            placeholder = nn.Parameter(absent, requires_grad=parameter.requires_grad)
            new[id(parameter)] = exchange(parameter, placeholder)
        assign_parameter(module, name, new[id(parameter)])


def fill_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give placeholders their storage back from `values`, in place; names without a value stay placeholders."""
    done: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in done:
            assign_parameter(module, name, done[id(parameter)])
        elif is_absent(parameter) and name in values:
            old = id(parameter)
            done[old] = exchange(parameter, nn.Parameter(values[name], requires_grad=parameter.requires_grad))
            assign_parameter(module, name, done[old])


def exchange(parameter: T, other: T) -> T:
    """Make the object `parameter` (any tensor) become what `other` is; gives the object to use from now on."""
    for key, value in vars(parameter).items():
        if key not in ("meta", "home"):
            other.__dict__.setdefault(key, value)
    if weakref.getweakrefcount(parameter):
        return other
    try:
        with computing_shapes():  # the swap looks for the parameter's node in the graph by a view of it
            torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError:  # an autograd graph of the user's still holds it
        return other
    return parameter


def assign_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter into a place of the module."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if owner._parameters.get(attribute) is not parameter:
        setattr(owner, attribute, parameter)
