"""Times and bytes of each layer, measured on the device at the micro-batch sizes that may be used."""

from __future__ import annotations

from lightning_autopipe.profiling.alignment import align_layers
from lightning_autopipe.profiling.findings import LayerFindings, ProfilingError, join_findings
from lightning_autopipe.profiling.optimizer_state import optimizer_state_ratio
from lightning_autopipe.profiling.profiler import (
    DEFAULT_BUDGET_S,
    LayerShare,
    measure_in_turns,
    measure_layers,
    optimizer_findings,
)
from lightning_autopipe.profiling.unchanged import on_device, unchanged

__all__ = [
    "DEFAULT_BUDGET_S",
    "LayerFindings",
    "LayerShare",
    "ProfilingError",
    "align_layers",
    "join_findings",
    "measure_in_turns",
    "measure_layers",
    "on_device",
    "optimizer_findings",
    "optimizer_state_ratio",
    "unchanged",
]
