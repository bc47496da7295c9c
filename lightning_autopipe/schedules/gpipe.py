"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.schedules._build import backward, check_sizes, forward

NAME = "gpipe"


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """The GPipe schedule: every stage runs all its forwards, then its backwards in the same order.

    It is as long as 1F1B and keeps all M micro-batches alive on every stage. Backwards go in the order of the forwards
    (the paper runs them in reverse), so that the sums of gradients are taken in the same order as under 1F1B.

    Three stages, four micro-batches, every action one slot long::

        stage 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    Raises:
        ConfigurationError: a number is below 1.

    Source:
        Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, NeurIPS 2019.
    """
    check_sizes(num_stages, num_microbatches)
    indices = range(num_microbatches)
    actions_by_rank = tuple(
        (*(forward(stage_index, index) for index in indices), *(backward(stage_index, index) for index in indices))
        for stage_index in range(num_stages)
    )
    return Schedule(name=NAME, actions_by_rank=actions_by_rank, num_microbatches=num_microbatches)
