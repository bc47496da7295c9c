"""How many micro-batches are alive on a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_autopipe.core.schedule import Action, ActionType, Schedule


def peak_stash(schedule: Schedule, stage_index: int) -> int:
    """Largest number of forwards on a stage whose backward is still to come, with all its parts.

    For plain 1F1B it is min(num_stages - stage_index, num_microbatches). Slices count as one each. Without backwards
    nothing is kept after a forward: 1.
    """
    return round(_peak(_actions_of(schedule, stage_index), [1] * schedule.num_microbatches))


def peak_stash_size(schedule: Schedule, stage_index: int) -> float:
    """Like `peak_stash`, but in sizes of micro-batches: a slice counts as its share of one."""
    return _peak(_actions_of(schedule, stage_index), slice_counts(schedule))


def _actions_of(schedule: Schedule, stage_index: int) -> Sequence[Action]:
    actions = schedule.actions_by_rank[schedule.pipeline_rank(stage_index)]
    if schedule.stages_per_rank == 1:
        return actions
    return [action for action in actions if action.stage_index == stage_index]


def _peak(actions: Sequence[Action], parts: Sequence[int]) -> float:
    """The most that is alive, where a unit of micro-batch m counts as 1 / ``parts[m]``."""
    alive = peak = 0.0
    has_backward = False
    for action in actions:
        if action.type is ActionType.FORWARD:
            alive += 1 / parts[action.microbatch_index]
            peak = max(peak, alive)
        elif action.type.ends_backward:
            has_backward = True
            alive -= 1 / parts[action.microbatch_index]
    return peak if has_backward else 1.0


def slice_counts(schedule: Schedule) -> list[int]:
    """In how many slices of equal size each micro-batch runs; 1 for whole ones."""
    counts = Counter(
        action.microbatch_index
        for action in schedule.actions_by_rank[0]
        if action.type is ActionType.FORWARD and action.stage_index == 0
    )
    return [max(1, counts[index]) for index in range(schedule.num_microbatches)]
