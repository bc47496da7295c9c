"""Forwards alone: validation, test and prediction."""

from __future__ import annotations

from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.schedules._build import check_sizes, forward

NAME = "forward_only"


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Every stage runs the forwards of all micro-batches in order; there is no backward.

    Three stages, four micro-batches, every action one slot long::

        stage 0 | F0 F1 F2 F3 .  .
        stage 1 | .  F0 F1 F2 F3 .
        stage 2 | .  .  F0 F1 F2 F3

    Raises:
        ConfigurationError: a number is below 1.
    """
    check_sizes(num_stages, num_microbatches)
    actions_by_rank = tuple(
        tuple(forward(stage_index, index) for index in range(num_microbatches)) for stage_index in range(num_stages)
    )
    return Schedule(name=NAME, actions_by_rank=actions_by_rank, num_microbatches=num_microbatches)
