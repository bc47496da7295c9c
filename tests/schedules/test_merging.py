"""Which halves go as one message, how that is lowered, and that it never lets anybody wait for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import Action, PlanError, Schedule
from lightning_autopipe.schedules import (
    interleaved_1f1b,
    lower,
    merged_microbatches,
    one_f_one_b,
    sliced_one_f_one_b,
    validate,
)
from lightning_autopipe.schedules.dependencies import run_with_blocking_sends


def written(*lists: str, num_microbatches: int) -> Schedule:
    return Schedule(
        name="written",
        actions_by_rank=tuple(
            tuple(Action.parse(f"{stage}{name}") for name in text.split()) for stage, text in enumerate(lists)
        ),
        num_microbatches=num_microbatches,
    )


SENDER, RECEIVER = "F0 F1.0 F1.1 B0 B1.0 B1.1", "F0 B0 F1.0 F1.1 B1.0 B1.1"


def test_halves_that_both_ends_run_together_are_merged_behind_the_warm_up() -> None:
    schedule = written(SENDER, RECEIVER, num_microbatches=2)
    assert merged_microbatches(schedule, 0) == {1}
    assert merged_microbatches(schedule, 1) == frozenset()
    lowered = lower(schedule)
    assert merged_microbatches(lowered, 0) == {1}
    lists = [" ".join(str(action)[1:] for action in actions) for actions in lowered.actions_by_rank]
    assert lists[0] == "F0 SA0 F1.0 F1.1 SA1 RG0 B0 RG1.0 B1.0 RG1.1 B1.1"
    assert lists[1] == "RA0 F0 B0 RA1 SG0 F1.0 F1.1 B1.0 SG1.0 B1.1 SG1.1"


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (SENDER, "F0 F1.0 F1.1 B0 B1.0 B1.1"),  # in the receiver's warm-up
        ("F0 F1.0 B0 F1.1 B1.0 B1.1", RECEIVER),  # the sender does something in between
        (SENDER, "F0 B0 F1.0 B1.0 F1.1 B1.1"),  # the receiver does
    ],
)
def test_other_halves_go_apart(sender: str, receiver: str) -> None:
    schedule = written(sender, receiver, num_microbatches=2)
    assert merged_microbatches(schedule, 0) == frozenset()
    sends = [str(action) for action in lower(schedule).actions_by_rank[0] if action.type.is_send]
    assert sends == ["0SA0", "0SA1.0", "0SA1.1"]


def test_nothing_whole_is_merged() -> None:
    for schedule in (one_f_one_b(3, 4), interleaved_1f1b(2, 4, 2)):
        assert not any(merged_microbatches(schedule, stage) for stage in range(schedule.num_stages))


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        (  # apart, where they are to go together
            ("F0 SA0 F1.0 SA1.0 F1.1 SA1.1 RG0 B0 RG1.0 B1.0 RG1.1 B1.1", ""),
            r"stage 0, step 3 \(0SA1.0, micro-batch 1\): nothing in the rest of the schedule belongs",
        ),
        (
            ("F0 SA0 F1.0 SA1 F1.1 RG0 B0 RG1.0 B1.0 RG1.1 B1.1", ""),
            r"stage 0, step 3 \(0SA1, micro-batch 1\): it needs 0F1.1, which the stage runs only later",
        ),
        (
            ("", "RA0 F0 B0 SG0 F1.0 RA1 F1.1 B1.0 SG1.0 B1.1 SG1.1"),
            r"stage 1, step 4 \(1F1.0, micro-batch 1\): it needs 1RA1, which the stage runs only later",
        ),
        (
            ("", "RA0 F0 B0 SG0 F1.0 F1.1 B1.0 SG1.0 B1.1 SG1.1"),
            r"stage 1, step 10 \(the end of its list\): 1RA1 \(micro-batch 1\) is missing",
        ),
    ],
)
def test_the_validator_takes_exactly_that(lists: tuple[str, str], problem: str) -> None:
    good = lower(written(SENDER, RECEIVER, num_microbatches=2))
    texts = [" ".join(str(action)[1:] for action in actions) for actions in good.actions_by_rank]
    with pytest.raises(PlanError, match=problem):
        validate(written(*(given or text for given, text in zip(lists, texts, strict=True)), num_microbatches=2))


def test_the_last_halves_are_merged_where_stages_take_them_together() -> None:
    schedule = sliced_one_f_one_b(4, 16, num_sliced_first=2, num_sliced_last=3)
    assert [sorted(merged_microbatches(schedule, stage)) for stage in range(4)] == [[13, 14, 15], [13, 14], [13], []]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.data())
def test_merged_slices_wait_in_no_circle(data: st.DataObject) -> None:
    num_stages, num_microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    num_first = data.draw(st.integers(0, num_microbatches))
    num_last = data.draw(st.integers(0, num_microbatches - num_first))
    limits = data.draw(st.lists(st.sampled_from([1, 1.5, 2, 2.5, 3, 5]), min_size=num_stages, max_size=num_stages))
    schedule = sliced_one_f_one_b(
        num_stages,
        num_microbatches,
        num_sliced_first=num_first,
        num_sliced_last=num_last,
        max_stash=sorted(limits, reverse=True),
    )
    lowered = lower(schedule)
    validate(lowered)
    progress = run_with_blocking_sends(lowered)
    for stage, actions in enumerate(lowered.actions_by_rank):
        assert progress.position(stage) == len(actions)
        merged = merged_microbatches(schedule, stage)
        assert merged == merged_microbatches(lowered, stage)
        names = {str(action) for action in actions}
        assert all((f"{stage}SA{index}" in names) > (f"{stage}SA{index}.0" in names) for index in merged)
