from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import ConfigurationError, Partition
from lightning_autopipe.planner import min_max_partition


def stage_costs(costs: Sequence[float], partition: Partition) -> list[float]:
    return [sum(costs[index] for index in partition.stage_layers(stage)) for stage in range(partition.num_stages)]


def every_partition(num_layers: int, num_stages: int) -> list[Partition]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [Partition(cut_points=cut_points, num_layers=num_layers) for cut_points in cuts]


def check_cover(partition: Partition, num_layers: int, num_stages: int) -> None:
    assert partition.num_stages == num_stages
    owned = [list(partition.stage_layers(stage)) for stage in range(num_stages)]
    assert all(owned)
    assert [layer for layers in owned for layer in layers] == list(range(num_layers))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_it_is_the_most_even_of_the_lightest(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = min_max_partition(costs, num_stages)
    check_cover(found, len(costs), num_stages)

    def badness(partition: Partition) -> tuple[float, float]:
        stages = stage_costs(costs, partition)
        return max(stages), sum(cost**2 for cost in stages)

    assert badness(found) == min(badness(partition) for partition in every_partition(len(costs), num_stages))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=8), st.data())
def test_it_is_the_lightest_for_real_costs_too(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = min_max_partition(costs, num_stages)
    check_cover(found, len(costs), num_stages)
    best = min(max(stage_costs(costs, partition)) for partition in every_partition(len(costs), num_stages))
    assert max(stage_costs(costs, found)) <= best * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1] * 5, 4, [2, 1, 1, 1]),
        ([1] * 30, 4, [8, 8, 7, 7]),
        ([1] * 42, 16, [3] * 10 + [2] * 6),
        ([1000] + [1] * 7, 3, [1000, 4, 3]),
        ([1000] + [1] * 3, 4, [1000, 1, 1, 1]),
        ([1, 1, 1, 1000], 2, [3, 1000]),
        ([10, 20, 30, 40], 4, [10, 20, 30, 40]),
        ([0, 0, 0], 3, [0, 0, 0]),
        ([5], 1, [5]),
    ],
)
def test_known_partitions(costs: list[int], num_stages: int, expected: list[int]) -> None:
    partition = min_max_partition(costs, num_stages)
    check_cover(partition, len(costs), num_stages)
    assert stage_costs(costs, partition) == expected


def test_more_stages_than_layers_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigurationError, match=r"num_stages=6 is more than the 5 layers .* set num_stages to at most 5"
    ):
        min_max_partition([1] * 5, 6)


@pytest.mark.parametrize("num_stages", [0, -1, True, 1.5])
def test_a_wrong_number_of_stages_is_refused(num_stages: int) -> None:
    with pytest.raises(ConfigurationError, match="num_stages must be an integer >= 1"):
        min_max_partition([1, 1], num_stages)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_wrong_cost_is_refused(cost: float) -> None:
    with pytest.raises(ConfigurationError, match="cost of layer 1 must be finite and >= 0"):
        min_max_partition([1, cost], 2)
