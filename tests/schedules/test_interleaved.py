"""Several stages a rank: grids by hand, any number of micro-batches, the checks of lists that hold several stages."""

from __future__ import annotations

import inspect
from textwrap import dedent, indent

import pytest

from lightning_autopipe.core import Action, ConfigurationError, PlanError, Schedule, ScheduleSpec
from lightning_autopipe.schedules import (
    draw_grid,
    get_schedule,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    peak_stash,
    peak_stash_size,
    validate,
)

GRIDS = {
    (2, 4, 2): """
        rank 0 (stages 0, 2) | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1 (stages 1, 3) | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .
    """,
    (2, 1, 2): """
        rank 0 (stages 0, 2) | 0F0 .   2F0 .   .   2B0 .   0B0
        rank 1 (stages 1, 3) | .   1F0 .   3F0 3B0 .   1B0 .
    """,
    (3, 4, 2): """
        rank 0 (stages 0, 3) | 0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3 .   3B0 .   3B1 .   3B2 .   3B3 0B0 0B1 0B2 0B3
        rank 1 (stages 1, 4) | .   1F0 1F1 1F2 1F3 4F0 4F1 4F2 4B0 4F3 4B1 .   4B2 .   4B3 1B0 1B1 1B2 1B3 .
        rank 2 (stages 2, 5) | .   .   2F0 2F1 2F2 2F3 5F0 5B0 5F1 5B1 5F2 5B2 5F3 5B3 2B0 2B1 2B2 2B3 .   .
    """,
}


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_grid_is_as_drawn(sizes: tuple[int, int, int]) -> None:
    schedule = interleaved_1f1b(*sizes)
    assert draw_grid(schedule) == "\n".join(line.rstrip() for line in dedent(GRIDS[sizes]).strip().splitlines())


def test_the_docstring_draws_what_the_function_gives() -> None:
    assert indent(draw_grid(interleaved_1f1b(2, 3, 2)), "    ") in (inspect.getdoc(interleaved_1f1b) or "")


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_any_number_of_micro_batches_runs_through(num_ranks: int, stages_per_rank: int) -> None:
    for num_microbatches in (1, 2, num_ranks, num_ranks + 1, 2 * num_ranks - 1, 2 * num_ranks + 1):
        schedule = interleaved_1f1b(num_ranks, num_microbatches, stages_per_rank)
        stash = [peak_stash(schedule, stage) for stage in range(schedule.num_stages)]
        validate(schedule, max_stash=stash)
        lowered = lower(schedule)
        validate(lowered)
        assert lowered.stages_per_rank == stages_per_rank
        for plain, full in zip(schedule.actions_by_rank, lowered.actions_by_rank, strict=True):
            assert tuple(action for action in full if action.type.is_compute) == plain


def test_one_stage_a_rank_is_1f1b() -> None:
    for num_ranks, num_microbatches in ((1, 1), (1, 3), (3, 2), (4, 9)):
        lists = interleaved_1f1b(num_ranks, num_microbatches, 1).actions_by_rank
        assert lists == one_f_one_b(num_ranks, num_microbatches).actions_by_rank


def test_what_each_stage_keeps() -> None:
    """Rank 0 warms up with four forwards: two of stage 0, two of stage 2; a fifth runs before its first backward."""
    schedule = interleaved_1f1b(2, 4, 2)
    assert [peak_stash(schedule, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [peak_stash_size(schedule, stage) for stage in range(4)] == [4.0, 3.0, 2.0, 1.0]
    with pytest.raises(PlanError, match=r"rank 0 \(stages 0, 2\), step 6 \(0F3, micro-batch 3\): 4 .* allowed are 3"):
        validate(schedule, max_stash=[3, 3, 2, 1])


def test_its_spec_counts_all_stages() -> None:
    spec = ScheduleSpec(name="interleaved_1f1b", stages_per_rank=3)
    assert get_schedule(spec, 6, 4) == interleaved_1f1b(2, 4, 3)
    with pytest.raises(ConfigurationError, match="8 stages cannot go round ranks that run 3 each; set num_stages"):
        get_schedule(spec, 8, 4)
    with pytest.raises(ConfigurationError, match="stages_per_rank=3 needs at least 2 ranks"):
        get_schedule(spec, 3, 4)
    with pytest.raises(ConfigurationError, match="'interleaved_1f1b' takes no warm-up depths"):
        get_schedule(ScheduleSpec(name="interleaved_1f1b", depths=(1, 0)), 2, 4)
    for name in ("1f1b", "gpipe", "zero_bubble", "sliced_1f1b"):
        with pytest.raises(ConfigurationError, match="runs one stage a rank, not 2; 'interleaved_1f1b' runs"):
            get_schedule(ScheduleSpec(name=name, stages_per_rank=2), 4, 4)


def written(*lists: str) -> Schedule:
    return Schedule(
        name="written",
        actions_by_rank=tuple(tuple(map(Action.parse, text.split())) for text in lists),
        num_microbatches=1,
        stages_per_rank=2,
    )


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        (("0F0 1F0", "3F0"), r"rank 0 \(stages 0, 2\), step 1 \(1F0, micro-batch 0\): the action belongs to stage 1"),
        (("0F0 2F0", "3F0 1F0"), r"rank 0 \(stages 0, 2\) stands at 2F0 and waits for 1F0; rank 1 \(stages 1, 3\) st"),
        (("0F0 0SA0 2RA0 2F0 2SA0", "1RA0 1F0 1SA0 3F0 3RA0"), "it needs 3RA0, which the stage runs only later"),
        (
            ("0F0 2F0 2B0 0B0 0SA0 2SA0 2SG0 2RA0 2RG0 0RG0", "1F0 3F0 3B0 1B0 1RA0 1SA0 1RG0 1SG0 3RA0 3SG0"),
            "it needs 2RA0, which the stage runs only later",
        ),
        (("0F0 2F0 0B0 2B0", "1F0 3F0 3B0 1B0"), "stands at 0B0 and waits for 1B0"),
    ],
)
def test_a_mistake_in_a_list_is_named(lists: tuple[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        validate(written(*lists))


def test_messages_of_one_channel_keep_their_order_across_stages() -> None:
    """Rank 0 sends stage 0's activation, then stage 2's gradient; rank 1 posts the receives the other way round."""
    lists = (
        "0F0 0SA0 2RA0 2F0 2SA0 2RG0 2B0 2SG0 0RG0 0B0",
        "1RA0 1F0 1SA0 3RA0 3F0 3B0 3SG0 1RG0 1B0 1SG0",
    )
    validate(written(*lists))
    first, second = lists[1].split(" 3RA0")
    moved = first + " 1RG0 3RA0" + second.replace(" 1RG0", "")
    with pytest.raises(PlanError, match=r"rank 1 \(stages 1, 3\) receives 1RG0 at this place of the sequence"):
        validate(written(lists[0], moved))


def test_a_rank_sends_nothing_to_itself() -> None:
    schedule = Schedule(
        name="alone",
        actions_by_rank=((Action.parse("0F0"), Action.parse("1F0")),),
        num_microbatches=1,
        stages_per_rank=2,
    )
    with pytest.raises(PlanError, match="has 2 stages on its only rank, which would send to itself"):
        validate(schedule)
