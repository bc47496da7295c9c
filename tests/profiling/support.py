"""Profiling a module's training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_autopipe.capture.records import CutKey
from lightning_autopipe.core import LayerMeasurement
from lightning_autopipe.profiling import align_layers, measure_layers
from tests.capture.support import Traced, traced

CPU = torch.device("cpu")


def profiled(
    module: nn.Module, batch: Any, *, cuts: Sequence[str] = (), **options: Any
) -> tuple[Traced, tuple[LayerMeasurement, ...]]:
    """Measure the layers of a step: those between the calls of the modules named in `cuts`, or those of the trace."""
    found = traced(module, (batch, 0))
    if cuts:
        keys = [CutKey("<step>", 0, 0), *(CutKey(path, 0, 0) for path in cuts)]
        found.trace.layers = align_layers(found.trace, found.table, keys)
    step = module.training_step
    options = {"device": CPU, "budget_s": 0.0, **options}
    return found, measure_layers(found.trace, found.table, module, step, (batch, 0), {}, **options)


def by_name(found: Traced, measured: tuple[LayerMeasurement, ...]) -> dict[str, LayerMeasurement]:
    return {str(layer.key): one for layer, one in zip(found.trace.layers, measured, strict=True)}
