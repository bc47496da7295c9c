"""Checks that a schedule can be executed and computes what it should."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.schedules.dependencies import (
    Progress,
    caused_send,
    needed_receive,
    on_stage,
    remote_dependency,
    run_by_dependencies,
    run_with_blocking_sends,
)
from lightning_autopipe.schedules.grid import draw_grid


def validate(schedule: Schedule, *, max_stash: Sequence[int] | None = None) -> None:
    """Checks a schedule, lowered or not; a valid one runs to its end.

    - every stage runs the forward of every micro-batch once, and, where there are backwards, each of them once, after
      its forward;
    - no computations wait for each other in a circle;
    - where ``max_stash`` is given, stage s never holds more than ``max_stash[s]`` micro-batches whose backward is to
      come;
    - a lowered schedule has each send and receive once, the send after the computation that gives the value and the
      receive before the one that takes it, in equal order at both ends, and runs to its end even if every send blocks
      until its receive is reached.

    Raises:
        PlanError: one of these does not hold. The message names stage, step (the position in the stage's list, from 0)
            and micro-batch and draws the schedule with the place marked.
    """
    _check_each_action(schedule)
    _check_completeness(schedule)
    _check_local_order(schedule)
    if max_stash is not None:
        _check_stash(schedule, max_stash)
    if schedule.is_lowered:
        _check_channel_order(schedule)
        _check_finished(schedule, run_by_dependencies(schedule), "")
        _check_finished(schedule, run_with_blocking_sends(schedule), "with sends that block until they are received, ")
    else:
        _check_finished(schedule, run_by_dependencies(schedule), "")


def _fail(schedule: Schedule, stage_index: int, step: int, problem: str) -> PlanError:
    actions = schedule.actions_by_rank[stage_index]
    where = f"stage {stage_index}, step {step}"
    if step < len(actions):
        where += f" ({actions[step]}, micro-batch {actions[step].microbatch_index})"
    else:
        where += " (the end of its list)"
    grid = draw_grid(schedule, error_at=(stage_index, step))
    return PlanError(f"schedule {schedule.name!r} is invalid at {where}: {problem}\n{grid}")


def _check_each_action(schedule: Schedule) -> None:
    last = schedule.num_stages - 1
    for stage_index, actions in enumerate(schedule.actions_by_rank):
        seen: dict[Action, int] = {}
        for step, action in enumerate(actions):
            if action.stage_index != stage_index:
                problem = f"the action belongs to stage {action.stage_index}, but is in the list of stage {stage_index}"
                raise _fail(schedule, stage_index, step, problem)
            if action.microbatch_index >= schedule.num_microbatches:
                problem = f"there are {schedule.num_microbatches} micro-batches, 0 to {schedule.num_microbatches - 1}"
                raise _fail(schedule, stage_index, step, problem)
            if not action.type.is_compute and not 0 <= action.peer_stage_index <= last:
                problem = f"there is no stage {action.peer_stage_index} to exchange with; stages are 0 to {last}"
                raise _fail(schedule, stage_index, step, problem)
            if action in seen:
                raise _fail(schedule, stage_index, step, f"the action was there before, at step {seen[action]}")
            seen[action] = step


def _check_completeness(schedule: Schedule) -> None:
    everything = {action for actions in schedule.actions_by_rank for action in actions}
    has_backward = any(action.type is ActionType.BACKWARD for action in everything)
    types = (ActionType.FORWARD, ActionType.BACKWARD) if has_backward else (ActionType.FORWARD,)
    # Stage 0 says which micro-batches are sliced, and how; all other stages and the backwards follow it.
    units = _units_of_first_stage(schedule)
    is_lowered = schedule.is_lowered
    for stage_index, actions in enumerate(schedule.actions_by_rank):
        expected: dict[Action, None] = {}  # in the order in which a missing one is named
        for action_type in types:
            for unit in units:
                compute = on_stage(unit, action_type, stage_index)
                expected[compute] = None
                if is_lowered:
                    send = caused_send(compute, schedule.num_stages)
                    receive = needed_receive(compute, schedule.num_stages)
                    expected.update({transfer: None for transfer in (send, receive) if transfer is not None})
        for step, action in enumerate(actions):
            if action not in expected:
                raise _fail(schedule, stage_index, step, "nothing in the rest of the schedule belongs to this action")
        found = set(actions)
        missing = next((action for action in expected if action not in found), None)
        if missing is not None:
            problem = f"{missing} (micro-batch {missing.microbatch_index}) is missing from the stage's list"
            raise _fail(schedule, stage_index, len(actions), problem)


def _units_of_first_stage(schedule: Schedule) -> list[Action]:
    """The forwards that there have to be on stage 0: whole micro-batches, or slices 0, 1, … of them."""
    slices: dict[int, set[int | None]] = defaultdict(set)
    for action in schedule.actions_by_rank[0]:
        if action.type is ActionType.FORWARD:
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


def _check_local_order(schedule: Schedule) -> None:
    is_lowered = schedule.is_lowered
    for stage_index, actions in enumerate(schedule.actions_by_rank):
        done: set[Action] = set()
        for step, action in enumerate(actions):
            needed: list[Action | None] = []
            if action.type is ActionType.BACKWARD:
                needed.append(on_stage(action, ActionType.FORWARD, stage_index))
            if action.type.is_compute and is_lowered:
                needed.append(needed_receive(action, schedule.num_stages))
            if action.type is ActionType.SEND_ACTIVATION:
                needed.append(on_stage(action, ActionType.FORWARD, stage_index))
            if action.type is ActionType.SEND_GRADIENT:
                needed.append(on_stage(action, ActionType.BACKWARD, stage_index))
            for other in needed:
                if other is not None and other not in done:
                    raise _fail(schedule, stage_index, step, f"it needs {other}, which the stage runs only later")
            done.add(action)


def _check_stash(schedule: Schedule, max_stash: Sequence[int]) -> None:
    if len(max_stash) != schedule.num_stages:
        raise PlanError(f"max_stash has {len(max_stash)} values, but the schedule has {schedule.num_stages} stages")
    for stage_index, actions in enumerate(schedule.actions_by_rank):
        alive = 0
        for step, action in enumerate(actions):
            alive += (action.type is ActionType.FORWARD) - (action.type is ActionType.BACKWARD)
            if alive > max_stash[stage_index]:
                problem = f"{alive} micro-batches are in flight, allowed are {max_stash[stage_index]}"
                raise _fail(schedule, stage_index, step, problem)


def _check_channel_order(schedule: Schedule) -> None:
    """Between two neighbours and in one direction, the n-th send and the n-th receive are for the same value."""
    for stage_index, actions in enumerate(schedule.actions_by_rank):
        for send_type in (ActionType.SEND_ACTIVATION, ActionType.SEND_GRADIENT):
            sends = [action for action in actions if action.type is send_type]
            if not sends:
                continue
            peer = sends[0].peer_stage_index
            receive_type = sends[0].counterpart.type
            receives = [action for action in schedule.actions_by_rank[peer] if action.type is receive_type]
            for send, receive in zip(sends, receives, strict=True):
                if send.counterpart != receive:
                    step = actions.index(send)
                    problem = f"stage {peer} receives {receive} at this place of the sequence: messages have no tags"
                    raise _fail(schedule, stage_index, step, problem)


def _check_finished(schedule: Schedule, progress: Progress, how: str) -> None:
    stuck = [
        stage_index
        for stage_index, actions in enumerate(schedule.actions_by_rank)
        if progress.position(stage_index) < len(actions)
    ]
    if not stuck:
        return
    waits = []
    for stage_index in stuck:
        action = schedule.actions_by_rank[stage_index][progress.position(stage_index)]
        waits.append(f"stage {stage_index} stands at {action} and waits for {_awaited(schedule, action)}")
    problem = f"deadlock: {how}no stage can go on: " + "; ".join(waits)
    raise _fail(schedule, stuck[0], progress.position(stuck[0]), problem)


def _awaited(schedule: Schedule, action: Action) -> Action | None:
    return remote_dependency(action, schedule.num_stages) if action.type.is_compute else action.counterpart
