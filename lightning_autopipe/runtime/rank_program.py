"""What one rank does in a step: its actions in order, and the messages before and after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.runtime.transport import Crossing, Direction, Message
from lightning_autopipe.runtime.units import Unit, units_of
from lightning_autopipe.schedules.merging import merged_microbatches

MIN_WINDOW = 2
MAX_WINDOW = 8
"""Receives that are posted ahead: at least one for what comes next and one behind it; each holds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAction:
    """One action with what it takes from a neighbour and what it gives to one."""

    action: Action
    key: int
    """Of the stage and the unit, by which is kept what lies between forward and backward."""
    unit_index: int
    """Number of the unit in the order of the batch."""
    takes_from: Direction | None
    takes: Crossing | None
    """What must have arrived."""
    gives: Crossing | None
    """What it makes for a neighbour."""
    sends: Message
    """What is sent behind it; nothing where the values wait for those of another slice."""
    has_backward: bool
    """Whether the unit has a backward, so that its values are kept."""
    ends_backward: bool
    """Whether nothing of the unit is to be kept any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """One rank's part of a schedule."""

    schedule: Schedule
    actions: tuple[RankAction, ...]
    last_backward: int | None
    """Position of the last action that gives gradients of parameters."""
    activation_order: tuple[Message, ...]
    """Messages that the rank receives from the previous one, in the order in which that sends them."""
    gradient_order: tuple[Message, ...]
    """Messages that it receives from the next one."""
    activation_window: int
    gradient_window: int
    units: tuple[Unit, ...]
    """In the order of the batch."""
    units_with_backward: frozenset[Unit]


def rank_program(schedule: Schedule, pipeline_rank: int) -> RankProgram:
    """Write out what one rank of a pipeline does.

    A lowered list has its sends right behind the computation that gives the value and its receives before the one that
    takes it. That happens here anyway, only that receives are posted earlier and no send blocks.
    """
    units = units_of(schedule)
    numbers = {unit: index for index, unit in enumerate(units)}
    own = [action for action in schedule.actions_by_rank[pipeline_rank] if action.type.is_compute]
    with_backward = frozenset(action.unit for action in own if action.type is not ActionType.FORWARD)
    sends = {message[-1]: message for message in _activation_messages(schedule, pipeline_rank)}
    num_ranks = schedule.num_ranks
    previous, following = (pipeline_rank - 1) % num_ranks, (pipeline_rank + 1) % num_ranks
    last_stage = schedule.num_stages - 1

    def rank_action(action: Action) -> RankAction:
        before = Crossing(action.stage_index - 1, *action.unit) if action.stage_index > 0 else None
        behind = Crossing(action.stage_index, *action.unit) if action.stage_index < last_stage else None
        takes_from, takes, gives = None, None, None
        sent: Message = ()
        if action.type is ActionType.FORWARD:
            takes_from, takes, gives = Direction.FORWARD, before, behind
            if behind is not None:
                sent = sends.get(behind, ())
        elif action.type.needs_gradient:
            takes_from, takes, gives = Direction.BACKWARD, behind, before
            if before is not None:
                sent = (before,)
        return RankAction(
            action=action,
            key=action.stage_index * len(units) + numbers[action.unit],
            unit_index=numbers[action.unit],
            takes_from=takes_from,
            takes=takes,
            gives=gives,
            sends=sent,
            has_backward=action.unit in with_backward,
            ends_backward=action.type.ends_backward,
        )

    peak = _peak_in_flight(schedule, pipeline_rank)
    return RankProgram(
        schedule=schedule,
        actions=tuple(rank_action(action) for action in own),
        last_backward=max((i for i, action in enumerate(own) if action.type.ends_backward), default=None),
        activation_order=_arriving(_activation_messages(schedule, previous), schedule, pipeline_rank, offset=1),
        gradient_order=_arriving(_gradient_messages(schedule, following), schedule, pipeline_rank, offset=0),
        activation_window=_window(_peak_in_flight(schedule, previous) - peak),
        gradient_window=_window(peak - _peak_in_flight(schedule, following)),
        units=units,
        units_with_backward=with_backward,
    )


def _activation_messages(schedule: Schedule, pipeline_rank: int) -> Iterator[Message]:
    merged = {stage: merged_microbatches(schedule, stage) for stage in schedule.stages_of(pipeline_rank)}
    halves: list[Crossing] = []
    actions = schedule.actions_by_rank[pipeline_rank]
    num_slices = Counter(action.microbatch_index for action in actions if action.type is ActionType.FORWARD)
    for action in actions:
        if action.type is not ActionType.FORWARD or action.stage_index == schedule.num_stages - 1:
            continue
        halves.append(Crossing(action.stage_index, *action.unit))
        is_merged = action.microbatch_index in merged[action.stage_index]
        if not is_merged or len(halves) == num_slices[action.microbatch_index]:
            yield tuple(halves)
            halves = []


def _gradient_messages(schedule: Schedule, pipeline_rank: int) -> Iterator[Message]:
    for action in schedule.actions_by_rank[pipeline_rank]:
        if action.type.needs_gradient and action.stage_index > 0:
            yield (Crossing(action.stage_index - 1, *action.unit),)


def _arriving(
    messages: Iterator[Message], schedule: Schedule, pipeline_rank: int, *, offset: int
) -> tuple[Message, ...]:
    """Those for a rank; `offset` stages behind the cut is the one that takes them."""
    return tuple(m for m in messages if schedule.pipeline_rank(m[0].cut_index + offset) == pipeline_rank)


def _peak_in_flight(schedule: Schedule, pipeline_rank: int) -> int:
    """Most units on a rank between a forward and the end of its backward; 0 where there is none."""
    actions = schedule.actions_by_rank[pipeline_rank]
    with_backward = {(action.stage_index, action.unit) for action in actions if action.type.ends_backward}
    alive = peak = 0
    for action in actions:
        if action.type is ActionType.FORWARD:
            alive += (action.stage_index, action.unit) in with_backward
        elif action.type.ends_backward:
            alive -= 1
        peak = max(peak, alive)
    return peak


def _window(num_ahead: int) -> int:
    """Receives to post ahead where the sender may run that many units further ahead than the receiver."""
    return max(MIN_WINDOW, min(num_ahead, MAX_WINDOW))
