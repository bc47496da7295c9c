"""Puts together what the ranks did in one step: a measured `Timeline`, to be compared with the predicted one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_autopipe.core.schedule import Action, ActionType
from lightning_autopipe.core.timeline import StepEnd, Timeline, TimelineEvent
from lightning_autopipe.runtime.clocks import AlignedClock
from lightning_autopipe.runtime.timeline_recorder import RankStep


def measured_timeline(
    steps: Mapping[int, RankStep],
    clocks: Mapping[int, AlignedClock],
    ranks: Sequence[Sequence[int]],
    *,
    peak_bytes: tuple[int, ...] = (),
) -> Timeline:
    """The step that begins with the first action of any rank.

    Nobody sees a message arrive, so those between stages are taken from both ends: one begins when its value has been
    computed, and ends when its receiver takes it. Where the receiver waited for it, that is when it arrived; else it
    may have been there sooner. Sums and the exchange begin when the last of the ranks that take part has come so far;
    until then the others wait.

    Args:
        steps: one step of each rank.
        clocks: by rank.
        ranks: ``ranks[r][s]`` runs stage s of replica r.
        peak_bytes: most memory in use, by rank; empty where unknown.
    """
    events = [event for rank, step in steps.items() for event in _events(rank, step, clocks[rank])]
    events = _begun_together(events, ranks)
    origin_s = min((event.start_s for event in events), default=0.0)
    events = [replace(event, start_s=event.start_s - origin_s, end_s=event.end_s - origin_s) for event in events]
    step_s = max((event.end_s for event in events), default=0.0)
    busy_s = sum(event.end_s - event.start_s for event in events if event.action is not StepEnd.EXCHANGE)
    idle = 1 - busy_s / (step_s * len(steps)) if step_s else 0.0
    return Timeline(
        events=(*events, *_messages(events, ranks)),
        step_s=step_s,
        bubble_fraction=min(1.0, max(0.0, idle)),
        peak_bytes=peak_bytes,
    )


def _events(rank: int, step: RankStep, clock: AlignedClock) -> Iterator[TimelineEvent]:
    for what, waited_from_s, started_s, ended_s in step.ran:
        start_s = clock.on_rank_0_s(started_s)
        yield TimelineEvent(
            action=what,
            global_rank=rank,
            start_s=start_s,
            end_s=max(start_s, clock.on_rank_0_s(ended_s)),
            waited_s=max(0.0, started_s - waited_from_s),
        )


def _begun_together(events: Sequence[TimelineEvent], ranks: Sequence[Sequence[int]]) -> list[TimelineEvent]:
    """Gradients are summed over the replicas of a stage; what else has no stage is done by all ranks together."""
    place_of = {rank: place for pipeline in ranks for place, rank in reversed(list(enumerate(pipeline)))}

    def group(event: TimelineEvent) -> tuple[StepEnd, int] | None:
        if isinstance(event.action, Action) or event.action is StepEnd.OPTIMIZER:
            return None
        return event.action, place_of[event.global_rank] if event.action is StepEnd.GRADIENTS else 0

    latest: dict[tuple[StepEnd, int], float] = {}
    for event in events:
        key = group(event)
        if key is not None:
            latest[key] = max(event.start_s, latest.get(key, event.start_s))
    together = []
    for event in events:
        key = group(event)
        start_s = event.start_s if key is None else min(latest[key], event.end_s)
        waited_s = event.waited_s + start_s - event.start_s
        together.append(replace(event, start_s=start_s, waited_s=waited_s) if start_s > event.start_s else event)
    return together


def _messages(events: Sequence[TimelineEvent], ranks: Sequence[Sequence[int]]) -> Iterator[TimelineEvent]:
    replica_of = {rank: index for index, pipeline in enumerate(ranks) for rank in pipeline}
    takers: dict[tuple[int, bool, int, tuple[int, int | None]], TimelineEvent] = {}
    for event in events:
        action = event.action
        if isinstance(action, Action) and (action.type is ActionType.FORWARD or action.type.needs_gradient):
            is_forward = action.type is ActionType.FORWARD
            takers[replica_of[event.global_rank], is_forward, action.stage_index, action.unit] = event
    for (replica_index, is_forward, stage_index, unit), event in takers.items():
        taker = takers.get((replica_index, is_forward, stage_index + (1 if is_forward else -1), unit))
        if taker is None or taker.global_rank == event.global_rank:
            continue
        yield TimelineEvent(
            action=Action(
                type=ActionType.SEND_ACTIVATION if is_forward else ActionType.SEND_GRADIENT,
                stage_index=stage_index,
                microbatch_index=unit[0],
                slice_index=unit[1],
            ),
            global_rank=event.global_rank,
            start_s=event.end_s,
            # Clocks are not that exact.
            end_s=max(event.end_s, taker.start_s),
        )
