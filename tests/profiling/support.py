"""Profiling a module's training step."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.records import CutKey
from lightning_autopipe.core import LayerMeasurement
from lightning_autopipe.profiling import (
    LayerFindings,
    LayerShare,
    align_layers,
    measure_in_turns,
    measure_layers,
    unchanged,
)
from tests.capture.support import Traced, traced
from tests.profiling.models import features

CPU = torch.device("cpu")


def profiled(
    module: nn.Module, batch: Any, *, cuts: Sequence[str] = (), **options: Any
) -> tuple[Traced, tuple[LayerMeasurement, ...]]:
    """Measure the layers of a step: those between the calls of the modules named in `cuts`, or those of the trace."""
    found = cut(module, batch, cuts)
    step = module.training_step
    options = {"device": CPU, "budget_s": 0.0, **options}
    return found, measure_layers(found.trace, found.table, module, step, (batch, 0), {}, **options)


def share(
    module: nn.Module,
    *,
    batch: Any = None,
    cuts: Sequence[str] = (),
    at_end: Callable[[], Any] = lambda: None,
    **options: Any,
) -> LayerFindings:
    """Measure a member's share of the layers, alike; call `at_end` before all is put back."""
    batch = features() if batch is None else batch
    found = cut(module, batch, cuts)
    with unchanged(module, found.trace.written_parameters):
        own = LayerShare(found.trace, found.table, module, module.training_step, (batch, 0), {}, device=CPU, **options)
        measured = measure_in_turns({1: own}, 0.0)[1]
        at_end()
    assert not isinstance(measured, str), measured
    return measured


def cut(module: nn.Module, batch: Any, cuts: Sequence[str]) -> Traced:
    found = traced(module, (batch, 0))
    if cuts:
        keys = [CutKey("<step>", 0, 0), *(CutKey(path, 0, 0) for path in cuts)]
        found.trace.layers = align_layers(found.trace, found.table, keys)
    return found


def by_name(found: Traced, measured: tuple[LayerMeasurement, ...]) -> dict[str, LayerMeasurement]:
    return {str(layer.key): one for layer, one in zip(found.trace.layers, measured, strict=True)}


def state_hash(module: nn.Module, batch: Tensor) -> str:
    """Of tensors, gradients, flags, attributes, random states, and which objects the attributes are."""
    parts: list[Any] = [batch.numpy().tobytes(), random.getstate(), torch.get_rng_state().numpy().tobytes()]
    for name, parameter in module.named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.numpy().tobytes()
        parts += [name, id(parameter), id(parameter.grad), gradient, parameter.requires_grad]
        parts += [parameter.detach().numpy().tobytes()]
    for submodule in module.modules():
        parts += [submodule.training, sorted(submodule.__dict__)]
        for name, value in submodule.__dict__.items():
            if name not in ("_modules", "_parameters"):
                parts += [name, id(value), pickle.dumps(value)]
    return hashlib.sha256(pickle.dumps(parts)).hexdigest()
