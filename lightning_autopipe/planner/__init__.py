"""Decides how a module is trained as a pipeline; imports no torch."""

from __future__ import annotations

from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import alike_devices
from lightning_autopipe.planner.min_max import min_max_partition
from lightning_autopipe.planner.plan import make_plan, plan_of
from lightning_autopipe.planner.prediction import predict_stages
from lightning_autopipe.planner.search import SearchResult, search
from lightning_autopipe.planner.search_space import SearchSpace
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.sizes import PipelineSizes, resolve_sizes

__all__ = [
    "CostModel",
    "PipelineSizes",
    "SearchResult",
    "SearchSpace",
    "Work",
    "alike_devices",
    "make_plan",
    "min_max_partition",
    "plan_of",
    "predict_stages",
    "resolve_sizes",
    "search",
    "simulate",
]
