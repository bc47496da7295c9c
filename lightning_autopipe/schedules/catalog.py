"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.schedules import forward_only, gpipe, one_f_one_b, sliced

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


def get_schedule(spec: str | ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule that a name or a plan's spec means, not lowered.

    Fewer micro-batches than were planned for, as a last batch may have, leave fewer to slice.

    Raises:
        ConfigurationError: there is no schedule of that name, it does not take what was chosen for it, or a number is
            below 1.
    """
    if isinstance(spec, str):
        spec = ScheduleSpec(name=spec)
    names = (*SCHEDULES, sliced.NAME)
    if spec.name not in names:
        raise ConfigurationError(f"there is no schedule {spec.name!r}; set schedule= to one of {', '.join(names)}")
    if spec.name == sliced.NAME:
        num_first = min(spec.num_sliced_first, num_microbatches)
        return sliced.sliced_one_f_one_b(
            num_stages,
            num_microbatches,
            num_sliced_first=num_first,
            num_sliced_last=min(spec.num_sliced_last, num_microbatches - num_first),
            max_stash=[depth + 1 for depth in spec.depths] or None,
        )
    if spec.is_sliced:
        raise ConfigurationError(f"schedule {spec.name!r} runs micro-batches whole; {sliced.NAME!r} slices them")
    if spec.name == one_f_one_b.NAME:
        return one_f_one_b.one_f_one_b(num_stages, num_microbatches, spec.depths or None)
    if spec.depths:
        raise ConfigurationError(f"schedule {spec.name!r} takes no warm-up depths; {one_f_one_b.NAME!r} does")
    return SCHEDULES[spec.name](num_stages, num_microbatches)
