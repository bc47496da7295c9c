"""What stages compute in a step, and for how long: the one measure by which predicted and measured are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_autopipe.core.schedule import Action, ActionType
from lightning_autopipe.core.timeline import StepEnd, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that one rank computes for one of its stages in a step: all micro-batches, slices and parts together."""

    global_rank: int
    stage_index: int
    forward_s: float
    backward_s: float

    @property
    def place(self) -> tuple[int, int]:
        """Rank and stage."""
        return self.global_rank, self.stage_index

    @property
    def compute_s(self) -> float:
        """Of forwards and backwards."""
        return self.forward_s + self.backward_s


def sum_stage_times(global_rank: int, ran: Iterable[tuple[Action | StepEnd, float]]) -> tuple[StageTimes, ...]:
    """What one rank computes, by stage.

    Args:
        global_rank: of the rank.
        ran: what it did, each with its seconds.
    """
    sums: dict[int, list[float]] = {}
    for action, seconds in ran:
        if isinstance(action, Action) and action.type.is_compute:
            of_stage = sums.setdefault(action.stage_index, [0.0, 0.0])
            of_stage[action.type is not ActionType.FORWARD] += seconds
    return tuple(
        StageTimes(global_rank=global_rank, stage_index=stage_index, forward_s=forward_s, backward_s=backward_s)
        for stage_index, (forward_s, backward_s) in sorted(sums.items())
    )


def stage_times(timeline: Timeline) -> tuple[StageTimes, ...]:
    """What each rank computes for each of its stages, by rank and stage."""
    by_rank: dict[int, list[tuple[Action | StepEnd, float]]] = {}
    for event in timeline.events:
        by_rank.setdefault(event.global_rank, []).append((event.action, event.end_s - event.start_s))
    return tuple(times for rank in sorted(by_rank) for times in sum_stage_times(rank, by_rank[rank]))
