"""Which slices of a micro-batch go to the next stage as one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_autopipe.core.schedule import Action, ActionType, Schedule


def merged_microbatches(schedule: Schedule, stage_index: int) -> frozenset[int]:
    """The micro-batches whose slices' activations go from a stage to the next one as one message.

    Slices go apart where that gets the next stage to work sooner. It does while that stage is in its warm-up; later it
    has backwards to run meanwhile, and one message costs less than two. So, where the schedule allows it at all, a
    micro-batch is merged where

    - the next stage has begun a backward before the first slice's forward, and
    - both stages run the forwards of all its slices right after each other.

    Then no computation waits in a circle that did not before. Such a circle would lead from the first slice's forward
    on the next stage to the last one's on this stage, and there either over its first slice's forward, which the next
    stage's needs anyhow, or over the stage before. To come there from the next stage it passes this stage behind the
    last slice's forward, as nothing stands between its slices: that was a circle already.

    Args:
        schedule: lowered or not.
        stage_index: of the sender.

    Returns:
        Their indices; none where micro-batches are whole, for the last stage, or with several stages a rank, which may
        pass a value on to each other in other ways.
    """
    if stage_index >= schedule.num_stages - 1 or schedule.stages_per_rank > 1 or not schedule.merges_slices:
        return frozenset()
    sender = _runs_of_slices(schedule.actions_by_rank[stage_index])
    receiver = _runs_of_slices(schedule.actions_by_rank[stage_index + 1])
    return frozenset(
        microbatch_index
        for microbatch_index, (begin, is_joined) in receiver.items()
        if is_joined and begin and sender.get(microbatch_index, (0, False))[1]
    )


def _runs_of_slices(actions: Sequence[Action]) -> dict[int, tuple[int, bool]]:
    """Of each sliced micro-batch, how many backwards began before its first forward, and if its forwards are joined."""
    places: dict[int, list[int]] = defaultdict(list)
    backwards: dict[int, int] = {}
    position = num_backwards = 0
    for action in actions:
        if action.type is ActionType.FORWARD and action.slice_index is not None:
            places[action.microbatch_index].append(position)
            backwards.setdefault(action.microbatch_index, num_backwards)
        position += action.type.is_compute
        num_backwards += action.type.needs_gradient
    return {
        microbatch_index: (backwards[microbatch_index], found[-1] - found[0] + 1 == len(found) > 1)
        for microbatch_index, found in places.items()
    }
