"""The validator names stage, step and micro-batch of each kind of mistake, and marks the place."""

from __future__ import annotations

from textwrap import dedent

import pytest

from lightning_autopipe.core import Action, PlanError, Schedule
from lightning_autopipe.schedules import draw_grid, gpipe, lower, one_f_one_b, validate


def written(*lists: str, num_microbatches: int = 2) -> Schedule:
    """A schedule from lists in which the stage's number is left out, unless it is another one (``1:F0``)."""
    actions_by_rank = []
    for stage_index, text in enumerate(lists):
        names = [name.replace(":", "") if ":" in name else f"{stage_index}{name}" for name in text.split()]
        actions_by_rank.append(tuple(Action.parse(name) for name in names))
    return Schedule(name="written", actions_by_rank=tuple(actions_by_rank), num_microbatches=num_microbatches)


def problem_of(schedule: Schedule, **options: list[int]) -> str:
    with pytest.raises(PlanError) as caught:
        validate(schedule, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("lists", "where", "problem"),
    [
        (("F0 F1 B0 B1", "F0 1:F1 0:B0"), "stage 1, step 2 (0B0, micro-batch 0)", "belongs to stage 0"),
        (("F0 F2 B0",), "stage 0, step 1 (0F2, micro-batch 2)", "there are 2 micro-batches, 0 to 1"),
        (("F0 F1 F0 B0 B1",), "stage 0, step 2 (0F0, micro-batch 0)", "was there before, at step 0"),
        (("F0 F1 B0 B1 B1",), "stage 0, step 4 (0B1, micro-batch 1)", "was there before, at step 3"),
        (("F0 F1 B0",), "stage 0, step 3 (the end of its list)", "0B1 (micro-batch 1) is missing"),
        (("F0 F1 B0 B1", "F0 B0"), "stage 1, step 2 (the end of its list)", "1F1 (micro-batch 1) is missing"),
        (("F0", "F0"), "stage 0, step 1 (the end of its list)", "0F1 (micro-batch 1) is missing"),
        (("F0 B1 F1 B0",), "stage 0, step 1 (0B1, micro-batch 1)", "needs 0F1, which the stage runs only later"),
        (("F0 F1 F1.0 B0 B1",), "stage 0, step 1 (0F1, micro-batch 1)", "found slices [0] and the whole"),
        (("F0 F1.0 F1.2",), "stage 0, step 1 (0F1.0, micro-batch 1)", "slices 0, 1, …; found slices [0, 2]"),
        (("F0 F1.0 F1.1", "F0 F1"), "stage 1, step 1 (1F1, micro-batch 1)", "nothing in the rest of the schedule"),
    ],
)
def test_a_mistake_in_a_list_is_named(lists: tuple[str, ...], where: str, problem: str) -> None:
    message = problem_of(written(*lists))
    assert f"'written' is invalid at {where}: " in message
    assert problem in message
    assert "^ ERROR HERE" in message


def test_the_place_is_marked_in_the_grid() -> None:
    message = problem_of(written("F0 F1 B0 B1", "F0 B1 F1 B0"))
    grid = dedent(
        """
        stage 0 | F0 F1 .  .  .  B0 B1
        stage 1 | .  F0 B1 F1 B0 .  .
                |       ^^ ERROR HERE
        """
    )
    # Stage 1 runs B1 before F1; the drawing shows when its actions could start by what they need from stage 0.
    assert message.splitlines()[1:] == [line.rstrip() for line in grid.strip("\n").splitlines()]


def test_computations_that_wait_in_a_circle_are_a_deadlock() -> None:
    message = problem_of(written("F0 B0 F1 B1", "F0 F1 B0 B1"))
    assert "invalid at stage 0, step 1 (0B0, micro-batch 0): deadlock: no stage can go on" in message
    assert "stage 0 stands at 0B0 and waits for 1B0; stage 1 stands at 1F1 and waits for 0F1" in message


def test_the_stash_is_bounded() -> None:
    message = problem_of(gpipe(2, 3), max_stash=[2, 1])
    assert "stage 0, step 2 (0F2, micro-batch 2): 3 micro-batches are in flight, allowed are 2" in message
    validate(gpipe(2, 3), max_stash=[3, 3])
    assert "max_stash has 1 values, but the schedule has 2 stages" in problem_of(gpipe(2, 3), max_stash=[1])


def test_both_ends_sending_first_is_a_deadlock_with_blocking_sends() -> None:
    """The order that pipelines have hung in: valid lists of computations, where each stage sends before it receives."""
    naive = written(
        "F0 SA0 F1 SA1 RG0 B0 RG1 B1",
        "RA0 F0 B0 SG0 RA1 F1 B1 SG1",
    )
    message = problem_of(naive)
    assert "stage 0, step 3 (0SA1, micro-batch 1): deadlock: with sends that block until they are received" in message
    assert "stage 0 stands at 0SA1 and waits for 1RA1; stage 1 stands at 1SG0 and waits for 0RG0" in message
    computations = written("F0 F1 B0 B1", "F0 B0 F1 B1")
    assert computations.actions_by_rank == one_f_one_b(2, 2).actions_by_rank
    validate(lower(computations))


@pytest.mark.parametrize(
    ("lists", "where", "problem"),
    [
        (("F0 SA0", "F0 RA0"), "stage 1, step 0 (1F0, micro-batch 0)", "needs 1RA0, which the stage runs only later"),
        (("SA0 F0", "RA0 F0"), "stage 0, step 0 (0SA0, micro-batch 0)", "needs 0F0"),
        (("F0 SA0 RG0 B0", "RA0 F0 SG0 B0"), "stage 1, step 2 (1SG0, micro-batch 0)", "needs 1B0"),
        (("F0", "RA0 F0"), "stage 0, step 1 (the end of its list)", "0SA0 (micro-batch 0) is missing"),
        (("F0 SA0 RG0", "RA0 F0"), "stage 0, step 2 (0RG0, micro-batch 0)", "nothing in the rest of the schedule"),
        (("F0 SA0", "RA0 F0 SA0"), "stage 1, step 2 (1SA0, micro-batch 0)", "no stage 2 to exchange with"),
        (("F0 SG0",), "stage 0, step 1 (0SG0, micro-batch 0)", "no stage -1 to exchange with"),
    ],
)
def test_a_mistake_in_a_lowered_list_is_named(lists: tuple[str, ...], where: str, problem: str) -> None:
    message = problem_of(written(*lists, num_microbatches=1))
    assert f"'written' is invalid at {where}: " in message
    assert problem in message


def test_messages_overtake_each_other_nowhere() -> None:
    message = problem_of(written("F0 SA0 F1 SA1", "RA1 F1 RA0 F0"))
    assert "stage 0, step 1 (0SA0, micro-batch 0): stage 1 receives 1RA1 at this place" in message


def test_a_receive_moves_ahead_where_free_gaps_would_wait_in_a_circle() -> None:
    """Stage 0 hands out F2 before it takes a gradient; stage 1 hands out two gradients before it wants F2."""
    out_of_step = written("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 B0 B1 F2 B2 F3 B3", num_microbatches=4)
    lowered = lower(out_of_step)
    validate(lowered)
    stage_1 = [str(action) for action in lowered.actions_by_rank[1]]
    assert stage_1.index("1RA2") < stage_1.index("1B1")


def test_nonsense_is_refused_and_not_lowered() -> None:
    with pytest.raises(PlanError, match="deadlock"):
        lower(written("F0 B0 F1 B1", "F0 F1 B0 B1"))


def test_lowering_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="lower it once"):
        lower(lower(one_f_one_b(2, 2)))


def test_a_wide_grid_is_cut_out_around_the_mark() -> None:
    schedule = gpipe(2, 100)
    lines = draw_grid(schedule, error_at=(1, 50), max_columns=8).splitlines()
    assert lines[0].startswith("stage 0 | … F47 ")
    assert lines[0].endswith(" …")
    assert lines[1][lines[2].index("^") :].startswith("F50 ")
    assert len(draw_grid(schedule, max_columns=8).splitlines()[0].split("|")[1].split()) == 9
