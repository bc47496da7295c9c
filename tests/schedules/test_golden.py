"""Schedules against grids written by hand, drawn as in the docstrings: one slot an action."""

from __future__ import annotations

import inspect
from pathlib import Path
from textwrap import dedent, indent

import pytest

from lightning_autopipe.core import ConfigurationError
from lightning_autopipe.schedules import (
    SCHEDULES,
    TRAINING_SCHEDULES,
    draw_grid,
    forward_only,
    get_schedule,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    sliced_one_f_one_b,
    validate,
    zero_bubble,
)

GRIDS = {
    ("1f1b", 1, 3): """
        stage 0 | F0 B0 F1 B1 F2 B2
    """,
    ("1f1b", 2, 4): """
        stage 0 | F0 F1 .  B0 F2 B1 F3 B2 .  B3
        stage 1 | .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """,
    ("1f1b", 4, 4): """
        stage 0 | F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
        stage 1 | .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
        stage 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
        stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
    """,
    ("1f1b", 4, 2): """
        stage 0 | F0 F1 .  .  .  .  .  B0 .  B1
        stage 1 | .  F0 F1 .  .  .  B0 .  B1 .
        stage 2 | .  .  F0 F1 .  B0 .  B1 .  .
        stage 3 | .  .  .  F0 B0 F1 B1 .  .  .
    """,
    ("1f1b", 4, 1): """
        stage 0 | F0 .  .  .  .  .  .  B0
        stage 1 | .  F0 .  .  .  .  B0 .
        stage 2 | .  .  F0 .  .  B0 .  .
        stage 3 | .  .  .  F0 B0 .  .  .
    """,
    ("gpipe", 3, 4): """
        stage 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    """,
    ("forward_only", 3, 4): """
        stage 0 | F0 F1 F2 F3 .  .
        stage 1 | .  F0 F1 F2 F3 .
        stage 2 | .  .  F0 F1 F2 F3
    """,
}

LISTS = {
    ("1f1b", 3, 2): [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ],
    ("1f1b", 3, 5): [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ],
}


def tidy(grid: str) -> str:
    return "\n".join(line.rstrip() for line in dedent(grid).strip().splitlines())


@pytest.mark.parametrize("key", GRIDS, ids=str)
def test_the_grid_is_as_drawn(key: tuple[str, int, int]) -> None:
    schedule = get_schedule(*key)
    validate(schedule)
    assert draw_grid(schedule) == tidy(GRIDS[key])


@pytest.mark.parametrize("key", LISTS, ids=str)
def test_the_lists_are_as_written(key: tuple[str, int, int]) -> None:
    lists = get_schedule(*key).actions_by_rank
    for stage_index, expected in enumerate(LISTS[key]):
        assert [str(action) for action in lists[stage_index]] == [f"{stage_index}{text}" for text in expected.split()]


@pytest.mark.parametrize(
    ("function", "name", "num_stages"),
    [(one_f_one_b, "1f1b", 4), (gpipe, "gpipe", 3), (forward_only, "forward_only", 3)],
)
def test_the_docstring_draws_what_the_function_gives(function: object, name: str, num_stages: int) -> None:
    grid = indent(draw_grid(get_schedule(name, num_stages, 4)), "    ")
    assert grid in (inspect.getdoc(function) or "")


def test_the_docstring_of_lowering_shows_what_it_gives() -> None:
    lists = lower(one_f_one_b(2, 2)).actions_by_rank
    lines = (inspect.getdoc(lower) or "").splitlines()
    for stage_index, actions in enumerate(lists):
        line = next(line for line in lines if line.strip().startswith(f"stage {stage_index} |"))
        drawn = line.split("|")[1].split("SA/RA:")[0].split("SG/RG:")[0].split()
        assert drawn == [str(action)[1:] for action in actions]


def test_the_page_about_schedules_draws_what_they_give() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    for schedule in (
        one_f_one_b(4, 4),
        gpipe(3, 4),
        sliced_one_f_one_b(3, 4, num_sliced_first=1, num_sliced_last=1),
        interleaved_1f1b(2, 4, 2),
        zero_bubble(4, 4),
        forward_only(3, 4),
    ):
        assert f"```\n{draw_grid(schedule)}\n```" in page, schedule.name


def test_a_schedule_is_found_by_its_name() -> None:
    assert set(SCHEDULES) == {"1f1b", "gpipe", "sliced_1f1b", "interleaved_1f1b", "zero_bubble", "forward_only"}
    assert SCHEDULES[:-1] == TRAINING_SCHEDULES
    for name in SCHEDULES:
        assert get_schedule(name, 2, 2).name == name
    with pytest.raises(ConfigurationError, match="no schedule 'zb'; set schedule= to one of 1f1b, gpipe"):
        get_schedule("zb", 2, 2)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "wrong"), [(0, 1, "num_stages"), (1, 0, "num_microbatches")]
)
def test_sizes_below_one_are_refused(name: str, num_stages: int, num_microbatches: int, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{wrong} >= 1, got 0"):
        get_schedule(name, num_stages, num_microbatches)
