"""How many micro-batches are alive on a stage."""

from __future__ import annotations

from lightning_autopipe.core.schedule import ActionType, Schedule


def peak_stash(schedule: Schedule, stage_index: int) -> int:
    """Largest number of forwards on a stage whose backward is still to come.

    For plain 1F1B it is min(num_stages - stage_index, num_microbatches). Slices count as one each. Without backwards
    nothing is kept after a forward: 1.
    """
    actions = schedule.actions_by_stage[stage_index]
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
