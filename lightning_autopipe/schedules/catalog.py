"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.schedules import forward_only, gpipe, one_f_one_b

SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        one_f_one_b.NAME: one_f_one_b.one_f_one_b,
        gpipe.NAME: gpipe.gpipe,
        forward_only.NAME: forward_only.forward_only,
    }
)
"""What makes each schedule from the numbers of stages and micro-batches."""

TRAINING_SCHEDULES: tuple[str, ...] = (one_f_one_b.NAME, gpipe.NAME)
"""Names that a user can set as ``schedule=``."""


def get_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The named schedule, not lowered.

    Raises:
        ConfigurationError: there is no schedule of that name, or a number is below 1.
    """
    if name not in SCHEDULES:
        raise ConfigurationError(f"there is no schedule {name!r}; set schedule= to one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_stages, num_microbatches)
