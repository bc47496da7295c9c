"""Backwards in two parts: grids by hand, limits of what is kept, mistakes that the validator names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent, indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import Action, ConfigurationError, PlanError, Schedule, ScheduleSpec
from lightning_autopipe.schedules import (
    draw_grid,
    get_schedule,
    lower,
    one_f_one_b,
    peak_stash,
    peak_stash_size,
    validate,
    zero_bubble,
)

GRIDS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "two stages": (
        lambda: zero_bubble(2, 4),
        """
        stage 0 | F0 F1 .  B0 F2 B1 F3 .  B2 .  .  B3 .
        stage 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
        """,
    ),
    "fewer micro-batches than stages": (
        lambda: zero_bubble(3, 2),
        """
        stage 0 | F0 F1 .  .  .  B0 .  B1 .
        stage 1 | .  F0 F1 .  I0 .  I1 W0 W1
        stage 2 | .  .  F0 I0 F1 I1 W0 W1 .
        """,
    ),
    "limits": (
        lambda: zero_bubble(2, 3, [3, 1]),
        """
        stage 0 | F0 F1 F2 B0 .  .  B1 .  .  B2
        stage 1 | .  F0 I0 W0 F1 I1 W1 F2 I2 W2
        """,
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_is_as_drawn(name: str) -> None:
    make, grid = GRIDS[name]
    assert draw_grid(make()) == "\n".join(line.rstrip() for line in dedent(grid).strip().splitlines())


def test_the_docstring_draws_what_the_function_gives() -> None:
    assert indent(draw_grid(zero_bubble(3, 4)), "    ") in (inspect.getdoc(zero_bubble) or "")


def test_a_stage_alone_splits_nothing() -> None:
    assert zero_bubble(1, 3).actions_by_rank == one_f_one_b(1, 3).actions_by_rank


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data())
def test_stages_keep_within_their_limits_until_the_weight_part(data: st.DataObject) -> None:
    num_stages, num_microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    limits = data.draw(st.none() | st.lists(st.sampled_from([1, 1.5, 2, 4]), min_size=num_stages, max_size=num_stages))
    schedule = zero_bubble(num_stages, num_microbatches, limits)
    bounds = [num_stages] * num_stages if limits is None else limits
    validate(schedule, max_stash=bounds)
    validate(lower(schedule), max_stash=bounds)
    assert all(peak_stash(schedule, stage) <= bound for stage, bound in enumerate(bounds))


def test_what_is_kept_is_counted_until_the_weight_part() -> None:
    schedule = written("F0 F1 I0 I1 F2 W0 I2 W1 W2", num_microbatches=3)
    validate(schedule)
    assert (peak_stash(schedule, 0), peak_stash_size(schedule, 0)) == (3, 3.0)
    with pytest.raises(PlanError, match=r"step 4 \(0F2, micro-batch 2\): 3 micro-batches are in flight, allowed are 2"):
        validate(schedule, max_stash=[2])


def test_its_spec_gives_limits() -> None:
    spec = ScheduleSpec(name="zero_bubble", depths=(3, 2, 0))
    assert get_schedule(spec, 3, 5) == zero_bubble(3, 5, [4, 3, 1])
    with pytest.raises(ConfigurationError, match="'zero_bubble' runs micro-batches whole; 'sliced_1f1b' slices them"):
        get_schedule(ScheduleSpec(name="zero_bubble", num_sliced_first=1), 3, 5)


@pytest.mark.parametrize(
    ("limits", "message"),
    [([1], "max_stash has 1 values for 2 stages"), ([1, 0.5], "max_stash of stage 1 must be at least 1 micro-batch")],
)
def test_limits_that_hold_nothing_are_refused(limits: list[float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        zero_bubble(2, 2, limits)


def written(*lists: str, num_microbatches: int = 1) -> Schedule:
    return Schedule(
        name="written",
        actions_by_rank=tuple(
            tuple(Action.parse(f"{stage}{name}") for name in text.split()) for stage, text in enumerate(lists)
        ),
        num_microbatches=num_microbatches,
    )


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        (("F0 W0 I0",), r"stage 0, step 1 \(0W0, micro-batch 0\): it needs 0I0, which the stage runs only later"),
        (("I0 F0 W0",), r"stage 0, step 0 \(0I0, micro-batch 0\): it needs 0F0, which the stage runs only later"),
        (("F0 I0",), r"the end of its list\): 0W0 \(micro-batch 0\) is missing"),
        (("F0 W0",), r"the end of its list\): 0I0 \(micro-batch 0\) is missing"),
        (("F0 B0 I0 W0",), r"step 1 \(0B0, micro-batch 0\): nothing in the rest of the schedule belongs to this"),
        (("F0 B0", "F0"), r"stage 1, step 1 \(the end of its list\): 1B0 \(micro-batch 0\) is missing"),
        (("F0 SA0 RG0 B0", "RA0 F0 I0 W0"), r"1SG0 \(micro-batch 0\) is missing"),
        (("F0 SA0 RG0 I0 W0", "RA0 F0 SG0 I0 W0"), r"step 2 \(1SG0, micro-batch 0\): it needs 1I0, which the stage"),
        (("F0 SA0 I0 RG0 W0", "RA0 F0 I0 SG0 W0"), r"step 2 \(0I0, micro-batch 0\): it needs 0RG0, which the stage"),
    ],
)
def test_a_mistake_in_a_list_is_named(lists: tuple[str, ...], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        validate(written(*lists))


def test_whole_backwards_and_split_ones_go_together() -> None:
    validate(written("F0 SA0 RG0 B0", "RA0 F0 I0 SG0 W0"))
    validate(written("F0 SA0 RG0 I0 W0", "RA0 F0 B0 SG0"))
    waiting = written("F0 I0 F1 B1 W0", "F0 F1 I0 I1 W0 W1", num_microbatches=2)
    with pytest.raises(PlanError, match="stage 0 stands at 0I0 and waits for 1I0; stage 1 stands at 1F1"):
        validate(waiting)
