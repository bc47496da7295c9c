from __future__ import annotations

import pytest

from lightning_autopipe.core.schedule import ActionType, Schedule
from lightning_autopipe.runtime.rank_program import MAX_WINDOW, RankProgram, rank_program
from lightning_autopipe.runtime.transport import Crossing, Message
from lightning_autopipe.schedules import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    sliced_one_f_one_b,
    zero_bubble,
)

EVERY = [
    one_f_one_b(1, 3),
    one_f_one_b(3, 5),
    one_f_one_b(3, 5, (4, 3, 0)),
    gpipe(2, 3),
    forward_only(3, 4),
    sliced_one_f_one_b(4, 6, num_sliced_first=2, num_sliced_last=2),
    zero_bubble(3, 5),
    interleaved_1f1b(2, 3, 2),
    interleaved_1f1b(3, 4, 2),
]


def sent(program: RankProgram, *, forward: bool) -> tuple[Message, ...]:
    return tuple(
        step.sends for step in program.actions if step.sends and (step.action.type is ActionType.FORWARD) == forward
    )


@pytest.mark.parametrize("schedule", EVERY, ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}")
def test_neighbours_expect_what_is_sent_in_its_order(schedule: Schedule) -> None:
    programs = [rank_program(schedule, rank) for rank in range(schedule.num_ranks)]
    for rank, program in enumerate(programs):
        assert programs[(rank + 1) % schedule.num_ranks].activation_order == sent(program, forward=True)
        assert programs[rank - 1].gradient_order == sent(program, forward=False)
        taken = [step.takes for step in program.actions if step.takes is not None]
        arriving = [crossing for message in program.activation_order + program.gradient_order for crossing in message]
        assert sorted(map(str, taken)) == sorted(map(str, arriving))
        last = program.last_backward
        ends = [step.action.type.ends_backward for step in program.actions]
        assert last is None if not any(ends) else ends[last:] == [True] + [False] * (len(ends) - last - 1)  # type: ignore[operator]


def test_lowered_lists_are_the_same() -> None:
    for rank in range(3):
        plain, lowered = (rank_program(s, rank) for s in (one_f_one_b(3, 4), lower(one_f_one_b(3, 4))))
        assert lowered.actions == plain.actions
        assert lowered.activation_order == plain.activation_order


def test_halves_go_together_once_the_receiver_runs_backwards() -> None:
    programs = [
        rank_program(sliced_one_f_one_b(2, 6, num_sliced_first=2, num_sliced_last=2), rank) for rank in range(2)
    ]
    order = programs[1].activation_order
    assert order[0] == (Crossing(0, 0, 0),)
    halves = [message for message in order if len(message) > 1]
    assert halves, order
    assert all([crossing.slice_index for crossing in message] == [0, 1] for message in halves)
    # The first half waits for the second one.
    waiting = [step for step in programs[0].actions if step.gives is not None and not step.sends]
    assert [step.gives for step in waiting if step.action.type is ActionType.FORWARD] == [m[0] for m in halves]


def test_receives_are_posted_as_far_ahead_as_the_sender_may_run() -> None:
    def windows(schedule: Schedule) -> list[tuple[int, int]]:
        programs = [rank_program(schedule, rank) for rank in range(schedule.num_ranks)]
        return [(program.activation_window, program.gradient_window) for program in programs]

    assert windows(one_f_one_b(4, 16)) == [(2, 2)] * 4
    assert windows(one_f_one_b(4, 16, (9, 8, 4, 0))) == [(2, 2), (2, 4), (4, 4), (4, 2)]
    assert windows(one_f_one_b(2, 64, (40, 0)))[1] == (MAX_WINDOW, 2)
    assert windows(forward_only(2, 9)) == [(2, 2)] * 2
    assert windows(gpipe(2, 9)) == [(2, 2)] * 2


def test_units_are_numbered_in_the_order_of_the_batch() -> None:
    program = rank_program(sliced_one_f_one_b(2, 3, num_sliced_first=1, num_sliced_last=1), 0)
    assert program.units == ((0, 0), (0, 1), (1, None), (2, 0), (2, 1))
    for step in program.actions:
        assert program.units[step.unit_index] == step.action.unit
