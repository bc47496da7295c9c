from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopipe.strategy.aggregate import Aggregate

ENTRIES = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 1000)), min_size=1, max_size=12)


def aggregate(entries: list[tuple[float, float]]) -> Aggregate:
    result = Aggregate()
    for value, weight in entries:
        result.add(value, weight)
    return result


@given(ENTRIES)
def test_values(entries: list[tuple[float, float]]) -> None:
    result = aggregate(entries)
    values = [value for value, _ in entries]
    weight = sum(weight for _, weight in entries)
    mean = sum(v * w for v, w in entries) / weight if weight else sum(values) / len(values)
    assert result.value("mean") == pytest.approx(mean, rel=1e-9, abs=1e-6)
    assert result.value("sum") == pytest.approx(sum(values), rel=1e-9, abs=1e-6)
    assert result.value("min") == min(values)
    assert result.value("max") == max(values)


@given(ENTRIES, st.integers(0, 12))
def test_merging_is_adding(entries: list[tuple[float, float]], split: int) -> None:
    merged = aggregate(entries[:split])
    merged.merge(aggregate(entries[split:]))
    whole = aggregate(entries)
    for reduction in ("mean", "sum", "min", "max"):
        assert merged.value(reduction) == pytest.approx(whole.value(reduction), rel=1e-9, abs=1e-6)


def test_a_value_without_weight_does_not_count() -> None:
    assert aggregate([(math.nan, 0), (2.0, 3), (4.0, 1)]).value("mean") == 2.5
    assert math.isnan(aggregate([(math.nan, 0), (math.nan, 0)]).value("mean"))
    assert aggregate([(1.0, 0), (3.0, 0)]).value("mean") == 2.0
    assert math.isnan(Aggregate().value("mean"))


def test_nan_wins() -> None:
    for reduction in ("mean", "sum", "min", "max"):
        assert math.isnan(aggregate([(1.0, 1), (math.nan, 1), (2.0, 1)]).value(reduction))


def test_a_constant_stays_what_it_is() -> None:
    assert aggregate([(0.1, 3), (0.1, 3), (0.1, 2)]).value("mean") == 0.1
