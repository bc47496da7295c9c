"""Parameters without memory in the places of placeholders, so that a layer can be run by itself before all are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.runtime.placement import assign_parameter

_LARGEST = 0.05  # of the random values that a layer is measured with


@contextlib.contextmanager
def stand_ins(
    module: nn.Module,
    device: torch.device,
    values: Mapping[str, Tensor] | None = None,
    *,
    on_change: Callable[[], None],
) -> Iterator[None]:
    """Have real parameters in the places of a module's placeholders for a while.

    They have the given values, or none, and no memory: see `in_memory`. `on_change` is called when the module has got
    other parameters, and when it has its own again.
    """
    places = {name: p for name, p in module.named_parameters(remove_duplicate=False) if is_absent(p)}
    standing: dict[int, nn.Parameter] = {}
    try:
        for name, placeholder in places.items():
            if id(placeholder) not in standing:
                standing[id(placeholder)] = _stand_in(placeholder, device, (values or {}).get(name))
            assign_parameter(module, name, standing[id(placeholder)])
        if places:
            on_change()
        yield
    finally:
        for name, placeholder in places.items():
            assign_parameter(module, name, placeholder)
        if places:
            on_change()


@contextlib.contextmanager
def in_memory(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Have memory, and some values, for those of these parameters that have none."""
    empty = [p for p in parameters if not has_memory(p)]
    try:
        for parameter in empty:
            last = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
            parameter.untyped_storage().resize_((last + 1) * parameter.element_size())
            with torch.no_grad():
                parameter.uniform_(-_LARGEST, _LARGEST)
        yield
    finally:
        for parameter in empty:
            parameter.untyped_storage().resize_(0)


def has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor that is not absent has memory for its values."""
    return tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _stand_in(placeholder: Tensor, device: torch.device, value: Tensor | None) -> nn.Parameter:
    if value is None:
        value = torch.empty(0, dtype=placeholder.dtype, device=device)
        with torch.no_grad():
            value.set_(value.untyped_storage(), 0, placeholder.size(), placeholder.stride())
            value.untyped_storage().resize_(0)
    return nn.Parameter(value, requires_grad=placeholder.requires_grad)
