"""The units of a step, micro-batches or slices of them, numbered in the order of the batch.

To a stage a slice is a smaller micro-batch: it has samples, random draws, a loss and a weight of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec

Unit = tuple[int, "int | None"]
"""Micro-batch index, and the slice of it or None for all of it: `Action.unit`."""


def units_of(schedule: Schedule) -> tuple[Unit, ...]:
    """Give the units that a schedule runs, in the order of the batch; their places are their numbers."""
    forwards = (action for action in schedule.actions_by_rank[0] if action.type is ActionType.FORWARD)
    return tuple(sorted({action.unit for action in forwards}, key=lambda unit: (unit[0], unit[1] or 0)))


def unit_name(unit: Unit) -> str:
    """Name a unit for people."""
    microbatch_index, slice_index = unit
    return f"micro-batch {microbatch_index}" if slice_index is None else f"micro-batch {microbatch_index}.{slice_index}"


def unit_sizes(units: Sequence[Unit], microbatch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Give the samples of each unit: slices of a micro-batch as even as they can be, larger ones first."""
    num_slices = [0] * len(microbatch_sizes)
    for microbatch_index, _ in units:
        num_slices[microbatch_index] += 1
    sizes = []
    for microbatch_index, slice_index in units:
        base, larger = divmod(microbatch_sizes[microbatch_index], num_slices[microbatch_index])
        sizes.append(base + ((slice_index or 0) < larger))
    return tuple(sizes)


def halve_no_single_samples(spec: str | ScheduleSpec, microbatch_sizes: Sequence[int]) -> str | ScheduleSpec:
    """Give the schedule that slices no micro-batch of one sample; fewer are sliced then.

    Args:
        spec: What is planned, for at most so many micro-batches.
        microbatch_sizes: Samples of each, larger ones first.
    """
    if isinstance(spec, str) or not spec.is_sliced:
        return spec
    num_microbatches = len(microbatch_sizes)
    num_first = min(spec.num_sliced_first, num_microbatches, sum(size > 1 for size in microbatch_sizes))
    # They get smaller, so that the last ones can all be halved or none of them.
    num_last = min(spec.num_sliced_last, num_microbatches - num_first) if microbatch_sizes[-1] > 1 else 0
    return replace(spec, num_sliced_first=num_first, num_sliced_last=num_last)


def forwards_first(schedule: Schedule, name: str, *, with_backwards: bool) -> Schedule:
    """Give a schedule of the same stages and ranks whose forwards all come first, without backwards if need be.

    What a valid list leaves out, or does later than all else, nothing can wait for in a circle.
    """

    def of_rank(actions: Sequence[Action]) -> tuple[Action, ...]:
        forwards = tuple(action for action in actions if action.type is ActionType.FORWARD)
        backwards = tuple(action for action in actions if action.type is not ActionType.FORWARD)
        return forwards + backwards if with_backwards else forwards

    return replace(schedule, name=name, actions_by_rank=tuple(map(of_rank, schedule.actions_by_rank)))
