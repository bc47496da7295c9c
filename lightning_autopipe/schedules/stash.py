"""How many micro-batches are alive on a stage."""

from __future__ import annotations

from collections import Counter

from lightning_autopipe.core.schedule import ActionType, Schedule


def peak_stash(schedule: Schedule, stage_index: int) -> int:
    """Largest number of forwards on a stage whose backward is still to come.

    For plain 1F1B it is min(num_stages - stage_index, num_microbatches). Slices count as one each. Without backwards
    nothing is kept after a forward: 1.
    """
    actions = schedule.actions_by_rank[stage_index]
    if not any(action.type is ActionType.BACKWARD for action in actions):
        return 1
    alive = peak = 0
    for action in actions:
        if action.type is ActionType.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.type is ActionType.BACKWARD:
            alive -= 1
    return peak


def peak_stash_size(schedule: Schedule, stage_index: int) -> float:
    """Like `peak_stash`, but in sizes of micro-batches: a slice counts as its share of one."""
    actions = schedule.actions_by_rank[stage_index]
    if not any(action.type is ActionType.BACKWARD for action in actions):
        return 1.0
    num_slices = slice_counts(schedule)
    alive = peak = 0.0
    for action in actions:
        if action.type is ActionType.FORWARD:
            alive += 1 / num_slices[action.microbatch_index]
            peak = max(peak, alive)
        elif action.type is ActionType.BACKWARD:
            alive -= 1 / num_slices[action.microbatch_index]
    return peak


def slice_counts(schedule: Schedule) -> list[int]:
    """In how many slices of equal size each micro-batch runs; 1 for whole ones."""
    forwards = (action for action in schedule.actions_by_rank[0] if action.type is ActionType.FORWARD)
    counts = Counter(action.microbatch_index for action in forwards)
    return [max(1, counts[index]) for index in range(schedule.num_microbatches)]
