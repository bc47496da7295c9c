"""Times and bytes of each layer, measured on the device at the micro-batch size in use."""

from __future__ import annotations

from lightning_autopipe.profiling.alignment import align_layers
from lightning_autopipe.profiling.optimizer_state import optimizer_state_ratio
from lightning_autopipe.profiling.profiler import DEFAULT_BUDGET_S, ProfilingError, measure_layers
from lightning_autopipe.profiling.unchanged import on_device

__all__ = [
    "DEFAULT_BUDGET_S",
    "ProfilingError",
    "align_layers",
    "measure_layers",
    "on_device",
    "optimizer_state_ratio",
]
