from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_autopipe.core import PipelinePlan
from lightning_autopipe.core.stage_times import StageTimes
from lightning_autopipe.planner.replanning import planned_stage_times, replan, stage_ratios

from .test_plan_step import a_plan


def measured(plan: PipelinePlan, *factors: float) -> tuple[StageTimes, ...]:
    """What a step takes of a plan's stages when each is so many times as slow as planned."""
    return tuple(
        replace(
            times,
            forward_s=factors[times.stage_index] * times.forward_s,
            backward_s=factors[times.stage_index] * times.backward_s,
        )
        for times in planned_stage_times(plan)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_plan_that_runs_as_planned_has_ratios_of_1_and_nothing_to_gain(schedule: str) -> None:
    plan = a_plan(6, schedule=schedule, num_replicas=2)
    ratios = stage_ratios(planned_stage_times(plan), measured(plan, 1.0, 1.0))
    assert [(ratio.times.global_rank, ratio.times.stage_index) for ratio in ratios] == [(0, 1), (1, 0), (2, 1), (3, 0)]
    assert [value for ratio in ratios for value in (ratio.forward, ratio.backward, ratio.whole)] == pytest.approx(
        [1.0] * 12
    )
    found = replan(plan, ratios)
    assert found is not None
    assert found.gain == 0.0
    assert found.partition == plan.partition


def test_layers_of_a_slow_stage_go_elsewhere() -> None:
    plan = a_plan(6, num_microbatches=8)
    assert plan.partition.cut_points == (3,)
    ratios = stage_ratios(planned_stage_times(plan), measured(plan, 1.0, 2.0))
    assert {ratio.times.stage_index: ratio.whole for ratio in ratios} == pytest.approx({0: 1.0, 1: 2.0})
    found = replan(plan, ratios)
    assert found is not None
    # Layers of 40 ms, then of 80 ms: stages of 3 + 3 layers take 240 ms at most, of 4 + 2 layers 200 ms.
    assert found.partition.cut_points == (4,)
    assert found.step_s == pytest.approx(8 * 0.240 + 0.120)
    assert found.new_step_s == pytest.approx(8 * 0.200 + 0.160, rel=0.05)
    assert found.gain == pytest.approx(1 - found.new_step_s / found.step_s)


def test_forwards_and_backwards_are_priced_apart_and_the_slowest_replica_counts() -> None:
    plan = a_plan(4, num_replicas=2)
    as_planned = measured(plan, 1.0, 1.0)
    slow = tuple(
        replace(times, forward_s=3 * times.forward_s) if times.global_rank == 3 else times for times in as_planned
    )
    ratios = {ratio.times.global_rank: ratio for ratio in stage_ratios(planned_stage_times(plan), slow)}
    assert (ratios[3].forward, ratios[3].backward) == pytest.approx((3.0, 1.0))
    found = replan(plan, tuple(ratios.values()))
    assert found is not None
    # Both replicas have stage 0 with forwards of 60 instead of 20 ms: F0 F1 | wait | B0 F2 B1 | wait | B2.
    assert found.step_s == pytest.approx(3 * (0.06 + 0.06) + 0.02 + 0.02)


def test_what_was_not_planned_does_not_count() -> None:
    plan = a_plan(4)
    stranger = StageTimes(global_rank=9, stage_index=0, forward_s=1.0, backward_s=1.0)
    assert stage_ratios(planned_stage_times(plan), [stranger]) == ()
