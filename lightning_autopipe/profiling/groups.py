"""Which layers are equal, so that one of them need be measured."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.records import Layer, StepTrace

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def layer_signature(trace: StepTrace, table: CutTable, module: nn.Module, layer: Layer) -> Hashable:
    """Describe what a layer computes; equal descriptions mean equal work.

    That is: its operations and their constants, which value each reads, all shapes and dtypes, the shapes of the
    parameters and whether they require gradients, and what crosses its two ends. Names and values do not count.
    """
    is_last = layer.stop == len(trace.operations)
    numbers: dict[int, int] = {}

    def value(index: int) -> Hashable:
        absent = trace.values[index].absent
        number = numbers.setdefault(index, len(numbers))
        return number, tuple(absent.shape), absent.dtype, tuple(absent.stride())

    received = tuple(value(index) for index in (table.crossing[layer.start] if layer.start else ()))
    state: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    operations = tuple(
        (
            op.function,
            tuple(value(index) for index in op.reads),
            tuple(_tensor(state, name) for name in (*op.parameters, *op.buffers)),
            tuple((path, value(index)) for path, index in op.made.items()),
            tuple((path, value(index)) for path, index in op.written_arguments),
            tuple(_constant(constant) for constant in op.constants),
            op.region is None,
            _module_type(module, op.module_path),
        )
        for op in trace.operations[layer.start : layer.stop]
    )
    sent = () if is_last else tuple(value(index) for index in table.crossing[layer.stop])
    return layer.start == 0, is_last, received, operations, sent


def _tensor(state: Mapping[str, Tensor], name: str) -> Hashable:
    tensor = state[name]
    return tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), tensor.requires_grad


def _constant(constant: Any) -> Hashable:
    name = f"{type(constant).__module__}.{type(constant).__qualname__}"
    return (name, constant) if isinstance(constant, PLAIN) else name


def _module_type(module: nn.Module, path: str) -> type | None:
    try:
        return type(module.get_submodule(path))
    except AttributeError:
        return None


def share_out(work: Mapping[int, float], num_members: int) -> list[list[int]]:
    """Share groups between members so that their work is about even: the heaviest first, to whom has least.

    Args:
        work: By group; the same on every member.
        num_members: How many share.
    """
    shares: list[list[int]] = [[] for _ in range(num_members)]
    loads = [0.0] * num_members
    for group in sorted(work, key=lambda key: (-work[key], key)):
        member = loads.index(min(loads))
        shares[member].append(group)
        loads[member] += work[group] or 1.0
    return shares
