"""Seconds at sizes that were not measured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopipe.planner.size_fit import SizeFit


@st.composite
def measured(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    sizes = sorted(draw(st.sets(st.integers(1, 256), min_size=1, max_size=6)))
    seconds = draw(st.lists(st.floats(0, 1e3), min_size=len(sizes), max_size=len(sizes)))
    return [float(size) for size in sizes], seconds


@given(measured(), st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_times_never_fall_and_stay_within_what_was_measured(
    points: tuple[list[float], list[float]], shares: list[float]
) -> None:
    sizes, seconds = points
    fit = SizeFit(sizes, seconds)
    asked = sorted([*sizes, *(min(sizes[-1], sizes[0] + share * (sizes[-1] - sizes[0])) for share in shares)])
    found = [fit.at(size) for size in asked]
    assert all(a <= b for a, b in pairwise(found)), (asked, found)
    assert found[0] == fit.at(sizes[0]) >= min(seconds) >= 0
    assert found[-1] <= max(seconds) * (1 + 1e-12)


@given(measured())
def test_measured_sizes_keep_what_was_measured(points: tuple[list[float], list[float]]) -> None:
    sizes, seconds = points
    rising = sorted(seconds)
    fit = SizeFit(sizes, rising)
    assert [fit.at(size) for size in sizes] == rising


def test_where_a_larger_size_took_less_both_have_the_mean() -> None:
    fit = SizeFit([1, 2, 4, 8], [1.0, 4.0, 2.0, 9.0])
    assert [fit.at(size) for size in (1, 2, 3, 4, 8)] == [1.0, 3.0, 3.0, 3.0, 9.0]


@given(
    st.floats(0.1, 10),
    st.floats(0.01, 1),
    st.floats(0, 3),
    st.sets(st.integers(1, 64), min_size=4, max_size=6),
    st.data(),
)
def test_a_floor_and_a_line_are_found(
    floor: float, beta: float, alpha: float, sizes: set[int], data: st.DataObject
) -> None:
    def true(size: float) -> float:
        return max(floor, alpha + beta * size)

    points = sorted(float(size) for size in sizes)
    if sum(alpha + beta * size > floor * 1.001 for size in points) < 2:
        return  # the line is not known
    fit = SizeFit(points, [true(size) for size in points])
    size = data.draw(st.floats(points[0], points[-1]))
    assert fit.at(size) == pytest.approx(true(size), rel=1e-6)


def test_the_end_of_the_floor_is_not_smoothed_away() -> None:
    # A floor of 10 up to size 5, then 2 a sample; a line from 4 to 16 would say 16 at 8.
    fit = SizeFit([1, 4, 16, 32], [10, 10, 32, 64])
    assert fit.at(2) == fit.at(4) == fit.at(5) == 10
    assert fit.at(8) == pytest.approx(16)
    assert SizeFit([1, 4, 16, 32], [0, 0, 0, 0]).at(8) == 0
