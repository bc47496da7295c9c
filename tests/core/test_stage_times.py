from __future__ import annotations

from lightning_autopipe.core import Action, StepEnd, Timeline, TimelineEvent
from lightning_autopipe.core.stage_times import StageTimes, stage_times


def test_forwards_and_all_parts_of_backwards_are_summed_by_rank_and_stage() -> None:
    ran = [
        (1, "0F0.0", 0.0, 1.0),
        (1, "0F0.1", 1.0, 2.0),
        (1, "0SA0.1", 2.0, 9.0),
        (0, "1F0", 2.0, 4.0),
        (0, "3F0", 4.0, 5.0),
        (0, "3I0", 5.0, 7.0),
        (0, "3W0", 7.0, 8.0),
        (0, StepEnd.OPTIMIZER, 8.0, 20.0),
    ]
    events = tuple(
        TimelineEvent(
            action=what if isinstance(what, StepEnd) else Action.parse(what),
            global_rank=rank,
            start_s=start_s,
            end_s=end_s,
        )
        for rank, what, start_s, end_s in ran
    )
    assert stage_times(Timeline(events=events, step_s=20.0, bubble_fraction=0.0)) == (
        StageTimes(global_rank=0, stage_index=1, forward_s=2.0, backward_s=0.0),
        StageTimes(global_rank=0, stage_index=3, forward_s=1.0, backward_s=3.0),
        StageTimes(global_rank=1, stage_index=0, forward_s=2.0, backward_s=0.0),
    )
