"""What a plan says of itself in a few lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_autopipe.core import Device, DeviceMapping, PipelinePlan, RunnerUp, ScheduleSpec, StepPrediction
from lightning_autopipe.visualization import plan_summary, plan_text, runners_up_table
from lightning_autopipe.visualization.plan_summary import plan_title, runner_up_cells

from .test_plan_table import a_plan, some_predictions

STEP = StepPrediction(step_s=2.0, num_samples=64, bubble_fraction=0.125, plain_step_s=2.0)


def a_predicted_plan(*, plain_step_s: float = 2.0, rank_0_costs: float = 0.0, **changes: Any) -> PipelinePlan:
    step = replace(STEP, plain_step_s=plain_step_s, rank_0_costs=rank_0_costs)
    return a_plan(**({"step_prediction": step, "microbatch_size": 4.0} | changes))


def devices(*models: str) -> tuple[Device, ...]:
    return tuple(
        Device(global_rank=rank, server="A", model=model, memory_bytes=1 << 30) for rank, model in enumerate(models)
    )


def test_plain_1f1b_says_only_what_a_step_is() -> None:
    plan = a_predicted_plan()
    assert plan_title(plan) == "3 stages × 2 replicas, 1f1b, 8 micro-batches of 4"
    assert plan_summary(plan) == ("a step takes 2 × 32 samples in 2 s: 32 samples/s, bubble 12.5 %",)
    assert plan_summary(a_plan()) == ()
    assert "a step takes 2 × 32 samples" in plan_text(plan, width=80)


@pytest.mark.parametrize(
    ("schedule", "kept", "plain_step_s", "line"),
    [
        (
            ScheduleSpec(name="1f1b", depths=(5, 3, 0)),
            (6, 4, 1),
            2.5,
            "20 % shorter: stages keep 6-4-1 micro-batches, not 3-2-1 (9 MiB more on stage 0)",
        ),
        (
            ScheduleSpec(name="1f1b", depths=(1, 0, 0)),
            (2, 1, 1),
            2.0,
            "plain 1F1B does not fit the memory: stages keep 2-1-1 micro-batches, not 3-2-1",
        ),
        (
            ScheduleSpec(name="sliced_1f1b", depths=(2, 1, 0), num_sliced_first=2),
            (3, 2, 1),
            2.5,
            "20 % shorter: stages keep no more micro-batches",
        ),
        (
            ScheduleSpec(name="sliced_1f1b", depths=(2, 2, 0), num_sliced_first=2),
            (3, 2.5, 1),
            2.5,
            "20 % shorter: stages keep 3-2.5-1 micro-batches, not 3-2-1 (1.5 MiB more on stage 1)",
        ),
        (
            ScheduleSpec(name="gpipe"),
            (8, 8, 8),
            1.6,
            "25 % longer: stages keep 8-8-8 micro-batches, not 3-2-1 (21 MiB more on stage 2)",
        ),
    ],
)
def test_what_a_schedule_gains_and_what_it_keeps_for_that(
    schedule: ScheduleSpec, kept: tuple[float, ...], plain_step_s: float, line: str
) -> None:
    """A micro-batch keeps 3 MiB on each stage."""
    predictions = some_predictions(3 << 20, kept)
    plan = a_predicted_plan(schedule=schedule, plain_step_s=plain_step_s, stage_predictions=predictions)
    told = plan_summary(plan)[1].replace(".0 %", " %").replace(f" than plain 1F1B ({plain_step_s:g} s)", "")
    assert told == line


def test_what_rank_0_costs_is_said_where_it_can_cost_something() -> None:
    alike, unlike = devices(*["gpu"] * 6), devices(*["gpu"] * 5, "old gpu")
    text = "rank 0 in the last stage, where the loss is logged, costs"
    assert plan_summary(a_predicted_plan(devices=alike))[1:] == ()
    assert plan_summary(a_predicted_plan(devices=unlike))[1:] == (f"{text} nothing",)
    assert plan_summary(a_predicted_plan(devices=unlike, rank_0_costs=0.0213))[1:] == (f"{text} 2.1 % of the step",)


def test_unlike_numbers_are_told_and_idle_devices() -> None:
    mapping = DeviceMapping(stage_ranks=((2, 4), (1,), (0,)))
    schedule = ScheduleSpec(name="1f1b", depths=(6, 1, 0))
    plan = a_predicted_plan(mapping=mapping, schedule=schedule, devices=devices(*"abcde"), plain_step_s=2.5)
    assert plan_title(plan) == "3 stages of 2 + 1 + 1 replicas, 1f1b, warm-up 6-1-0, 8 micro-batches of 4"
    assert plan_summary(plan) == (
        "a step takes 64 samples in 2 s: 32 samples/s, bubble 12.5 %",
        "20.0 % shorter than plain 1F1B (2.5 s): stages run up to 6-1-0 micro-batches ahead",
        "idle: rank 3 (d)",
    )
    shares = a_predicted_plan(replica_microbatches=(9, 7))
    assert plan_title(shares).endswith("1f1b, 9 + 7 micro-batches of 4")
    assert plan_summary(shares)[0].startswith("a step takes 64 samples")


def test_runners_up_are_few_rows() -> None:
    slower = RunnerUp(
        replica_counts=(2, 2), schedule=ScheduleSpec(name="1f1b"), num_microbatches=4, step_s=2.5, samples_per_s=25.6
    )
    unlike = replace(slower, replica_counts=(3, 1))
    assert runner_up_cells(slower) == ("2 × 2", "1f1b", "4", "2.5 s", "25.6")
    assert runner_up_cells(unlike)[0] == "2 of 3 + 1"
    assert runners_up_table(a_plan(runners_up=(slower,) * 9)).row_count == 5
