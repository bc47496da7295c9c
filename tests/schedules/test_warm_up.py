"""Warm-ups of any depth, and slices: grids by hand, what is kept, what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent, indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import ConfigurationError, PlanError, Schedule
from lightning_autopipe.schedules import (
    default_depths,
    draw_grid,
    gpipe,
    lower,
    one_f_one_b,
    peak_stash,
    peak_stash_size,
    slice_counts,
    sliced_one_f_one_b,
    validate,
)

GRIDS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "deeper": (
        lambda: one_f_one_b(3, 5, [4, 2, 0]),
        """
        stage 0 | F0 F1 F2 F3 F4 B0 .  B1 .  B2 .  B3 .  B4
        stage 1 | .  F0 F1 F2 B0 F3 B1 F4 B2 .  B3 .  B4 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .
        """,
    ),
    "none": (
        lambda: one_f_one_b(3, 2, [0, 0, 0]),
        """
        stage 0 | F0 .  .  .  .  B0 F1 .  .  .  .  B1
        stage 1 | .  F0 .  .  B0 .  .  F1 .  .  B1 .
        stage 2 | .  .  F0 B0 .  .  .  .  F1 B1 .  .
        """,
    ),
    "front sliced": (
        lambda: sliced_one_f_one_b(2, 3, num_sliced_first=1),
        """
        stage 0 | F0.0 F0.1 F1   .    B0.0 B0.1 F2   B1   .    B2
        stage 1 | .    F0.0 F0.1 B0.0 B0.1 F1   B1   F2   B2   .
        """,
    ),
    "both ends sliced": (
        lambda: sliced_one_f_one_b(2, 3, num_sliced_first=1, num_sliced_last=1),
        """
        stage 0 | F0.0 F0.1 F1   .    B0.0 F2.0 B0.1 F2.1 B1   .    B2.0 B2.1
        stage 1 | .    F0.0 F0.1 B0.0 B0.1 F1   B1   F2.0 F2.1 B2.0 B2.1 .
        """,
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_is_as_drawn(name: str) -> None:
    make, grid = GRIDS[name]
    schedule = make()
    validate(schedule)
    validate(lower(schedule))
    assert draw_grid(schedule) == "\n".join(line.rstrip() for line in dedent(grid).strip().splitlines())


def test_the_docstring_of_slices_draws_what_the_function_gives() -> None:
    grid = draw_grid(sliced_one_f_one_b(3, 4, num_sliced_first=1, num_sliced_last=1))
    assert indent(grid, "    ") in (inspect.getdoc(sliced_one_f_one_b) or "")


def test_plain_1f1b_and_gpipe_are_special_cases() -> None:
    for num_stages, num_microbatches in ((1, 1), (4, 2), (4, 4), (5, 9)):
        plain = one_f_one_b(num_stages, num_microbatches).actions_by_rank
        assert one_f_one_b(num_stages, num_microbatches, default_depths(num_stages)).actions_by_rank == plain
        assert sliced_one_f_one_b(num_stages, num_microbatches, num_sliced_first=0).actions_by_rank == plain
        whole = one_f_one_b(num_stages, num_microbatches, [num_microbatches - 1] * num_stages)
        assert whole.actions_by_rank == gpipe(num_stages, num_microbatches).actions_by_rank


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.data())
def test_any_depths_are_valid_and_keep_a_microbatch_more_than_they_are_deep(data: st.DataObject) -> None:
    num_stages, num_microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    depths = sorted(data.draw(st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages)), reverse=True)
    schedule = one_f_one_b(num_stages, num_microbatches, depths)
    stash = [min(depth + 1, num_microbatches) for depth in depths]
    validate(schedule, max_stash=stash)
    validate(lower(schedule))
    assert [peak_stash(schedule, stage) for stage in range(num_stages)] == stash


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.data())
def test_slices_keep_within_their_limits(data: st.DataObject) -> None:
    num_stages, num_microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    num_first = data.draw(st.integers(0, num_microbatches))
    num_last = data.draw(st.integers(0, num_microbatches - num_first))
    limits = data.draw(st.lists(st.sampled_from([1, 1.5, 2, 3, 5.5]), min_size=num_stages, max_size=num_stages))
    limits.sort(reverse=True)
    schedule = sliced_one_f_one_b(
        num_stages, num_microbatches, num_sliced_first=num_first, num_sliced_last=num_last, max_stash=limits
    )
    validate(schedule)
    validate(lower(schedule))
    assert all(peak_stash_size(schedule, stage) <= limit for stage, limit in enumerate(limits))
    sliced = [index < num_first or index >= num_microbatches - num_last for index in range(num_microbatches)]
    assert slice_counts(schedule) == [2 if is_sliced else 1 for is_sliced in sliced]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one_f_one_b(2, 2, [1]), "1 warm-up depths are given for 2 stages"),
        (lambda: one_f_one_b(2, 2, [1, -1]), "depth of stage 1 must be an integer >= 0, got -1"),
        (lambda: one_f_one_b(2, 2, [1.0, 0]), "depth of stage 0 must be an integer >= 0, got 1.0"),  # type: ignore[list-item]
        (lambda: one_f_one_b(2, 2, [0, 1]), "depth of stage 1 is 1, allowed is at most the 0 of stage 0"),
        (lambda: sliced_one_f_one_b(2, 2, num_sliced_first=-1), "num_sliced_first must be an integer >= 0"),
        (lambda: sliced_one_f_one_b(2, 2, num_sliced_first=2, num_sliced_last=1), "are more than the 2 micro-batches"),
        (lambda: sliced_one_f_one_b(2, 2, num_sliced_first=1, max_stash=[1]), "max_stash has 1 values for 2 stages"),
        (lambda: sliced_one_f_one_b(2, 2, num_sliced_first=1, max_stash=[1, 0.5]), "stage 1 must be at least 1"),
        (lambda: sliced_one_f_one_b(2, 2, num_sliced_first=1, max_stash=[1, 2]), "at most the 1 of stage 0"),
    ],
)
def test_what_cannot_run_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_rising_depths_would_be_a_deadlock() -> None:
    """Why they are refused: stage 1 wants F1 before it gives the gradient that stage 0 waits for."""
    first, last = one_f_one_b(1, 2, [0]).actions_by_rank[0], one_f_one_b(2, 2, [1, 1]).actions_by_rank[1]
    with pytest.raises(PlanError, match="deadlock"):
        validate(Schedule(name="rising", actions_by_rank=(first, last), num_microbatches=2))
