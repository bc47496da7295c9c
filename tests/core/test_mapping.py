"""Device mappings say which ranks run which stage."""

from __future__ import annotations

import pytest

from lightning_autopipe.core import DeviceMapping, ParallelLayout, PlanError


def test_a_device_mapping_says_unlike_numbers_of_replicas() -> None:
    mapping = DeviceMapping(stage_ranks=((1, 2, 3), (0,)))
    assert (mapping.num_stages, mapping.num_replicas, mapping.ranks) == (2, None, (0, 1, 2, 3))
    assert mapping.idle_ranks(6) == (4, 5)
    with pytest.raises(PlanError, match=r"\[3, 1\]"):
        mapping.pipeline_ranks(0)
    layout = ParallelLayout(num_stages=4, num_replicas=2)
    of_layout = DeviceMapping.of_layout(layout)
    assert [of_layout.pipeline_ranks(index) for index in (0, 1)] == [(3, 2, 1, 0), (7, 6, 5, 4)]


@pytest.mark.parametrize(
    ("stage_ranks", "expected"),
    [
        ((), "empty"),
        (((1,), ()), "stage 1 has no rank"),
        (((1,), (0, 1)), "rank 1 is on stage 0 and on stage 1"),
        (((0,), (1,)), "rank 0 must be the first one of the last stage"),
        (((1,), (0, -2)), "names -2"),
        (((True,), (0,)), "names True"),
        ([(1,), (0,)], "tuple of tuples"),
    ],
)
def test_a_wrong_device_mapping_is_refused(stage_ranks: tuple[tuple[int, ...], ...], expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        DeviceMapping(stage_ranks=stage_ranks)
