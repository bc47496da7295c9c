"""Partitions by simple rules."""

from __future__ import annotations

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.min_max import min_max_partition

PARTITION_RULES = ("auto", "uniform", "parameters")
"""What ``partition`` can name: the shortest simulated step, equally many layers, or parameters as even as possible."""


def partition_by_rule(rule: str, cost: CostModel, num_stages: int) -> Partition | None:
    """The partition that a rule says; None for ``"auto"``, which is to be searched.

    Raises:
        ConfigurationError: there is no such rule, or there are more stages than layers.
    """
    if rule == "uniform":
        return min_max_partition([1] * cost.num_layers, num_stages)
    if rule == "parameters":
        return min_max_partition([layer.param_bytes for layer in cost.profile.layers], num_stages)
    if rule != "auto":
        allowed = ", ".join(f'"{name}"' for name in PARTITION_RULES)
        raise ConfigurationError(f"partition must be {allowed} or a list of cut points, got {rule!r}")
    return None
