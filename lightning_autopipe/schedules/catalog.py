"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.schedules import forward_only, gpipe, interleaved, one_f_one_b, sliced, zero_bubble
from lightning_autopipe.schedules._build import check_sizes


def _one_f_one_b(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    return one_f_one_b.one_f_one_b(num_stages, num_microbatches, spec.depths or None)


def _gpipe(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    return gpipe.gpipe(num_stages, num_microbatches)


def _sliced(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    num_first = min(spec.num_sliced_first, num_microbatches)
    return sliced.sliced_one_f_one_b(
        num_stages,
        num_microbatches,
        num_sliced_first=num_first,
        num_sliced_last=min(spec.num_sliced_last, num_microbatches - num_first),
        max_stash=_limits(spec),
        merges_slices=spec.merges_slices,
    )


def _interleaved(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    num_ranks, left = divmod(num_stages, spec.stages_per_rank)
    if left:
        raise ConfigurationError(
            f"{num_stages} stages cannot go round ranks that run {spec.stages_per_rank} each; set num_stages to a "
            f"multiple of stages_per_rank={spec.stages_per_rank}"
        )
    return interleaved.interleaved_1f1b(num_ranks, num_microbatches, spec.stages_per_rank)


def _zero_bubble(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    return zero_bubble.zero_bubble(num_stages, num_microbatches, _limits(spec))


def _forward_only(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    return forward_only.forward_only(num_stages, num_microbatches)


def _limits(spec: ScheduleSpec) -> list[int] | None:
    """What stages may keep: what they are warmed up with, and one more."""
    return [depth + 1 for depth in spec.depths] or None


_MAKERS: Mapping[str, Callable[[ScheduleSpec, int, int], Schedule]] = MappingProxyType(
    {
        one_f_one_b.NAME: _one_f_one_b,
        gpipe.NAME: _gpipe,
        sliced.NAME: _sliced,
        interleaved.NAME: _interleaved,
        zero_bubble.NAME: _zero_bubble,
        forward_only.NAME: _forward_only,
    }
)
_TAKES_DEPTHS = (one_f_one_b.NAME, sliced.NAME, zero_bubble.NAME)

SCHEDULES: tuple[str, ...] = tuple(_MAKERS)
"""The names of all schedules."""

TRAINING_SCHEDULES: tuple[str, ...] = tuple(name for name in _MAKERS if name != forward_only.NAME)
"""Names that a user can set as ``schedule=``."""


def check_trainable(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> None:
    """Checks that a plan's schedule trains.

    Raises:
        ConfigurationError: it has no backwards, or cannot be written out (see `get_schedule`).
    """
    if spec.name not in TRAINING_SCHEDULES:
        raise ConfigurationError(
            f"schedule {spec.name!r} is none that trains; a plan has one of {', '.join(TRAINING_SCHEDULES)}"
        )
    get_schedule(spec, num_stages, num_microbatches)


def get_schedule(spec: str | ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule that a name or a plan's spec means, not lowered.

    Fewer micro-batches than were planned for, as a last batch may have, leave fewer to slice.

    Args:
        spec: the schedule.
        num_stages: of the whole pipeline, also where ranks run several.
        num_microbatches: of one step.

    Raises:
        ConfigurationError: there is no schedule of that name, it does not take what was chosen for it, or a number is
            below 1.
    """
    if isinstance(spec, str):
        spec = ScheduleSpec(name=spec)
    if spec.name not in _MAKERS:
        raise ConfigurationError(f"there is no schedule {spec.name!r}; set schedule= to one of {', '.join(_MAKERS)}")
    if spec.is_sliced and spec.name != sliced.NAME:
        raise ConfigurationError(f"schedule {spec.name!r} runs micro-batches whole; {sliced.NAME!r} slices them")
    if spec.stages_per_rank > 1 and spec.name != interleaved.NAME:
        raise ConfigurationError(
            f"schedule {spec.name!r} runs one stage a rank, not {spec.stages_per_rank}; {interleaved.NAME!r} runs "
            "several"
        )
    if spec.depths and spec.name not in _TAKES_DEPTHS:
        raise ConfigurationError(
            f"schedule {spec.name!r} takes no warm-up depths; {', '.join(map(repr, _TAKES_DEPTHS))} do"
        )
    check_sizes(num_stages, num_microbatches)
    return _MAKERS[spec.name](spec, num_stages, num_microbatches)
