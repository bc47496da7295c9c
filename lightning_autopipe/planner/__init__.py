"""Decides how a module is trained as a pipeline; imports no torch."""

from __future__ import annotations

from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.min_max import min_max_partition
from lightning_autopipe.planner.plan import make_plan
from lightning_autopipe.planner.prediction import predict_stages
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.sizes import PipelineSizes, resolve_sizes

__all__ = [
    "CostModel",
    "PipelineSizes",
    "Work",
    "make_plan",
    "min_max_partition",
    "predict_stages",
    "resolve_sizes",
    "simulate",
]
