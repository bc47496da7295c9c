"""Checks that a schedule can be executed and computes what it should."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.schedules.dependencies import (
    Messages,
    Progress,
    caused_send,
    messages_of,
    needed_receive,
    on_stage,
    run_by_dependencies,
    run_with_blocking_sends,
)
from lightning_autopipe.schedules.grid import draw_grid, rank_name
from lightning_autopipe.schedules.stash import slice_counts

_ROUNDING = 1e-9
"""Shares of micro-batches, added and taken away again, may leave this much."""


def validate(schedule: Schedule, *, max_stash: Sequence[float] | None = None) -> None:
    """Checks a schedule, lowered or not; a valid one runs to its end.

    - every stage runs the forward of every micro-batch once, and, where there are backwards, each of them once, after
      its forward: whole, or its input part and later its weight part;
    - no computations wait for each other in a circle;
    - where ``max_stash`` is given, stage s never holds more than ``max_stash[s]`` micro-batches whose backward is to
      come, in all its parts; a slice counts as its share;
    - a lowered schedule has each send and receive once, the send after the computation that gives the value and the
      receive before the one that takes it, slices merged where `merged_microbatches` says so, in equal order at both
      ends, and runs to its end even if every send blocks until its receive is reached.

    Raises:
        PlanError: one of these does not hold. The message names stage, or rank where ranks run several stages, step
            (the position in the rank's list, from 0) and micro-batch and draws the schedule with the place marked. Or
            one rank is to run several stages: it would have to send to itself.
    """
    if schedule.num_ranks == 1 and schedule.stages_per_rank > 1:
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.stages_per_rank} stages on its only rank, which would send to "
            "itself; let the rank run one stage, or take 2 ranks"
        )
    _check_each_action(schedule)
    messages = messages_of(schedule)
    _check_completeness(schedule, messages)
    _check_local_order(schedule, messages)
    if max_stash is not None:
        _check_stash(schedule, max_stash)
    if schedule.is_lowered:
        _check_channel_order(schedule)
        _check_finished(schedule, run_by_dependencies(schedule), "")
        _check_finished(schedule, run_with_blocking_sends(schedule), "with sends that block until they are received, ")
    else:
        _check_finished(schedule, run_by_dependencies(schedule), "")


def _fail(schedule: Schedule, rank: int, step: int, problem: str) -> PlanError:
    actions = schedule.actions_by_rank[rank]
    where = f"{rank_name(schedule, rank)}, step {step}"
    if step < len(actions):
        where += f" ({actions[step]}, micro-batch {actions[step].microbatch_index})"
    else:
        where += " (the end of its list)"
    grid = draw_grid(schedule, error_at=(rank, step))
    return PlanError(f"schedule {schedule.name!r} is invalid at {where}: {problem}\n{grid}")


def _check_each_action(schedule: Schedule) -> None:
    last = schedule.num_stages - 1
    for rank, actions in enumerate(schedule.actions_by_rank):
        stages = schedule.stages_of(rank)
        seen: dict[Action, int] = {}
        for step, action in enumerate(actions):
            if action.stage_index not in stages:
                owner, name = action.stage_index, rank_name(schedule, rank)
                problem = f"the action belongs to stage {owner}, but is in the list of {name}"
                raise _fail(schedule, rank, step, problem)
            if action.microbatch_index >= schedule.num_microbatches:
                problem = f"there are {schedule.num_microbatches} micro-batches, 0 to {schedule.num_microbatches - 1}"
                raise _fail(schedule, rank, step, problem)
            if not action.type.is_compute and not 0 <= action.peer_stage_index <= last:
                problem = f"there is no stage {action.peer_stage_index} to exchange with; stages are 0 to {last}"
                raise _fail(schedule, rank, step, problem)
            if action in seen:
                raise _fail(schedule, rank, step, f"the action was there before, at step {seen[action]}")
            seen[action] = step


def _check_completeness(schedule: Schedule, messages: Messages) -> None:
    found = {action for actions in schedule.actions_by_rank for action in actions}
    has_backward = any(action.type.is_compute and action.type is not ActionType.FORWARD for action in found)
    # Stage 0 says which micro-batches are sliced, and how; all other stages and the backwards follow it.
    units = _units_of_first_stage(schedule)
    is_lowered = schedule.is_lowered
    for rank, actions in enumerate(schedule.actions_by_rank):
        expected: dict[Action, None] = {}  # in the order in which a missing one is named
        for stage_index in schedule.stages_of(rank):
            computations = [on_stage(unit, ActionType.FORWARD, stage_index) for unit in units]
            if has_backward:
                computations += [part for unit in units for part in _backward_parts(unit, stage_index, found)]
            for computation in computations:
                expected[computation] = None
                if is_lowered:
                    transfers = messages.sends.get(computation), messages.receives.get(computation)
                    expected.update({transfer: None for transfer in transfers if transfer is not None})
        for step, action in enumerate(actions):
            if action not in expected:
                raise _fail(schedule, rank, step, "nothing in the rest of the schedule belongs to this action")
        missing = next((action for action in expected if action not in found), None)
        if missing is not None:
            problem = f"{missing} (micro-batch {missing.microbatch_index}) is missing from the stage's list"
            raise _fail(schedule, rank, len(actions), problem)


def _backward_parts(unit: Action, stage_index: int, found: set[Action]) -> list[Action]:
    """The backward of a unit on a stage: in two parts where one of them is there, else whole."""
    parts = [on_stage(unit, part, stage_index) for part in (ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT)]
    is_split = any(part in found for part in parts)
    return parts if is_split else [on_stage(unit, ActionType.BACKWARD, stage_index)]


def _units_of_first_stage(schedule: Schedule) -> list[Action]:
    """The forwards that there have to be on stage 0: whole micro-batches, or slices 0, 1, … of them."""
    slices: dict[int, set[int | None]] = defaultdict(set)
    for action in schedule.actions_by_rank[0]:
        if action.type is ActionType.FORWARD and action.stage_index == 0:
            slices[action.microbatch_index].add(action.slice_index)
    units = []
    for microbatch_index in range(schedule.num_microbatches):
        found = slices[microbatch_index]
        numbers = sorted(index for index in found if index is not None)
        if numbers and (None in found or numbers != list(range(len(numbers)))):
            step = next(
                step
                for step, action in enumerate(schedule.actions_by_rank[0])
                if action.microbatch_index == microbatch_index and action.type is ActionType.FORWARD
            )
            problem = f"micro-batch {microbatch_index} runs whole or as slices 0, 1, …; found slices {numbers}"
            if None in found:
                problem += " and the whole"
            raise _fail(schedule, 0, step, problem)
        sliced: list[int | None] = [*numbers] or [None]
        for slice_index in sliced:
            units.append(
                Action(
                    type=ActionType.FORWARD,
                    stage_index=0,
                    microbatch_index=microbatch_index,
                    slice_index=slice_index,
                )
            )
    return units


def _check_local_order(schedule: Schedule, messages: Messages) -> None:
    computation_of = {send: computation for computation, send in messages.sends.items()}
    is_lowered = schedule.is_lowered
    for rank, actions in enumerate(schedule.actions_by_rank):
        done: set[Action] = set()
        for step, action in enumerate(actions):
            needed: list[Action | None] = []
            if action.type.needs_gradient:
                needed.append(on_stage(action, ActionType.FORWARD, action.stage_index))
            if action.type is ActionType.BACKWARD_WEIGHT:
                needed.append(on_stage(action, ActionType.BACKWARD_INPUT, action.stage_index))
            if is_lowered and action.type.is_compute:
                needed.append(messages.receives.get(action))
            if action.type.is_send:
                needed.append(computation_of[action])
            for other in needed:
                if other is not None and other not in done:
                    raise _fail(schedule, rank, step, f"it needs {other}, which the stage runs only later")
            done.add(action)


def _check_stash(schedule: Schedule, max_stash: Sequence[float]) -> None:
    if len(max_stash) != schedule.num_stages:
        raise PlanError(f"max_stash has {len(max_stash)} values, but the schedule has {schedule.num_stages} stages")
    num_slices = slice_counts(schedule)
    alive = [0.0] * schedule.num_stages
    for rank, actions in enumerate(schedule.actions_by_rank):
        for step, action in enumerate(actions):
            stage_index, share = action.stage_index, 1 / num_slices[action.microbatch_index]
            alive[stage_index] += share * ((action.type is ActionType.FORWARD) - action.type.ends_backward)
            if alive[stage_index] > max_stash[stage_index] + _ROUNDING:
                problem = f"{alive[stage_index]:g} micro-batches are in flight, allowed are {max_stash[stage_index]:g}"
                raise _fail(schedule, rank, step, problem)


def _check_channel_order(schedule: Schedule) -> None:
    """Between two ranks and in one direction, the n-th send and the n-th receive are for the same value."""
    channels: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)  # sends, by sender and receiver
    for rank, actions in enumerate(schedule.actions_by_rank):
        for step, action in enumerate(actions):
            if action.type.is_send:
                channels[rank, schedule.pipeline_rank(action.peer_stage_index)].append((step, action))
    sends = {channel: iter(found) for channel, found in channels.items()}
    for rank, actions in enumerate(schedule.actions_by_rank):
        for receive in actions:
            if receive.type.is_receive:
                sender = schedule.pipeline_rank(receive.peer_stage_index)
                step, send = next(sends[sender, rank])
                if send.counterpart != receive:
                    name = rank_name(schedule, rank)
                    problem = f"{name} receives {receive} at this place of the sequence: messages have no tags"
                    raise _fail(schedule, sender, step, problem)


def _check_finished(schedule: Schedule, progress: Progress, how: str) -> None:
    stuck = [rank for rank, actions in enumerate(schedule.actions_by_rank) if progress.position(rank) < len(actions)]
    if not stuck:
        return
    waits = []
    for rank in stuck:
        action = schedule.actions_by_rank[rank][progress.position(rank)]
        waits.append(f"{rank_name(schedule, rank)} stands at {action} and waits for {_awaited(schedule, action)}")
    problem = f"deadlock: {how}no stage can go on: " + "; ".join(waits)
    raise _fail(schedule, stuck[0], progress.position(stuck[0]), problem)


def _awaited(schedule: Schedule, action: Action) -> Action:
    if not action.type.is_compute:
        return action.counterpart
    receive = needed_receive(action, schedule.num_stages)
    assert receive is not None, f"{action} waits for nobody"
    others = schedule.actions_by_rank[schedule.pipeline_rank(receive.peer_stage_index)]
    return next(other for other in others if caused_send(other, schedule.num_stages) == receive.counterpart)
