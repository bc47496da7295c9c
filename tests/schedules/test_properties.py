"""What holds for every schedule, of every size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import Action, ActionType, Schedule
from lightning_autopipe.schedules import SCHEDULES, get_schedule, lower, one_f_one_b, peak_stash, validate
from lightning_autopipe.schedules.dependencies import caused_send, needed_receive, run_with_blocking_sends

NUM_STAGES = range(1, 7)
NUM_MICROBATCHES = range(1, 10)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_every_size_is_valid_lowered_and_not(name: str, num_stages: int) -> None:
    for num_microbatches in NUM_MICROBATCHES:
        schedule = get_schedule(name, num_stages, num_microbatches)
        validate(schedule)
        lowered = lower(schedule)
        validate(lowered)
        assert lowered.num_microbatches == num_microbatches
        for plain, full in zip(schedule.actions_by_rank, lowered.actions_by_rank, strict=True):
            assert tuple(action for action in full if action.type.is_compute) == plain


@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_1f1b_keeps_as_many_microbatches_as_the_stages_that_follow(num_stages: int) -> None:
    for num_microbatches in (*NUM_MICROBATCHES, 40):
        schedule = one_f_one_b(num_stages, num_microbatches)
        bound = [min(num_stages - stage_index, num_microbatches) for stage_index in range(num_stages)]
        assert [peak_stash(schedule, stage_index) for stage_index in range(num_stages)] == bound
        validate(schedule, max_stash=bound)
        validate(lower(schedule), max_stash=bound)


def test_gpipe_keeps_all_microbatches_and_forwards_alone_none() -> None:
    assert [peak_stash(get_schedule("gpipe", 3, 7), stage_index) for stage_index in range(3)] == [7, 7, 7]
    assert peak_stash(get_schedule("forward_only", 3, 7), 1) == 1


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_sends_stand_behind_their_computation_and_receives_before(name: str) -> None:
    """No receive moves away from the computation that takes it, so none holds a buffer for longer than it must."""
    for num_stages in NUM_STAGES:
        for num_microbatches in NUM_MICROBATCHES:
            for actions in lower(get_schedule(name, num_stages, num_microbatches)).actions_by_rank:
                computed_before: Action | None = None
                received: list[Action] = []
                for action in actions:
                    if action.type.is_send:
                        assert computed_before is not None
                        assert computed_before.microbatch_index == action.microbatch_index
                    elif action.type.is_receive:
                        received.append(action)
                    else:
                        assert all(receive.microbatch_index == action.microbatch_index for receive in received)
                        received.clear()
                        computed_before = action
                assert not received


@st.composite
def valid_schedules(draw: st.DrawFn) -> Schedule:
    """Any order in which the computations can happen, split by stage: warm-ups of any depth, stages out of step."""
    num_stages = draw(st.integers(1, 5))
    num_microbatches = draw(st.integers(1, 6))
    num_slices = draw(st.sampled_from([None, 2]))
    chance = random.Random(draw(st.integers(0, 2**32)))
    order = list(range(num_microbatches))
    chance.shuffle(order)
    slices: list[int | None] = [None] if num_slices is None else list(range(num_slices))
    todo = [
        Action(type=action_type, stage_index=stage, microbatch_index=microbatch, slice_index=slice_index)
        for microbatch in order
        for slice_index in slices
        for action_type in (ActionType.FORWARD, ActionType.BACKWARD)
        for stage in range(num_stages)
    ]
    done: set[Action] = set()
    lists: list[list[Action]] = [[] for _ in range(num_stages)]
    while todo:
        ready = []
        for stage in range(num_stages):
            for action_type in (ActionType.FORWARD, ActionType.BACKWARD):
                # Messages have no tags: a stage takes the micro-batches of one direction in the order of `todo`.
                first = next((a for a in todo if a.stage_index == stage and a.type is action_type), None)
                if first is not None and _can_run(first, done, num_stages):
                    ready.append(first)
        action = chance.choice(ready)
        todo.remove(action)
        done.add(action)
        lists[action.stage_index].append(action)
    return Schedule(
        name="any", actions_by_rank=tuple(tuple(actions) for actions in lists), num_microbatches=num_microbatches
    )


def _can_run(action: Action, done: set[Action], num_stages: int) -> bool:
    receive = needed_receive(action, num_stages)
    if receive is not None and receive.counterpart not in {caused_send(other, num_stages) for other in done}:
        return False
    forward = Action.parse(str(action).replace("B", "F"))
    return action.type is ActionType.FORWARD or forward in done


@settings(deadline=None, max_examples=150, derandomize=True)
@given(valid_schedules())
def test_any_valid_schedule_is_lowered_to_lists_that_block_nowhere(schedule: Schedule) -> None:
    validate(schedule)
    lowered = lower(schedule)
    validate(lowered)
    progress = run_with_blocking_sends(lowered)
    for stage_index, actions in enumerate(lowered.actions_by_rank):
        assert progress.position(stage_index) == len(actions)
