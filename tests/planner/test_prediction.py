from __future__ import annotations

from typing import Any

import pytest

from lightning_autopipe.core import (
    LayerMeasurement,
    LayerProfile,
    ModelProfile,
    Partition,
    PipelinePlan,
    PlanError,
    ScheduleSpec,
    TiedParameter,
)
from lightning_autopipe.planner import CostModel, make_plan, predict_stages


def measured(forward_s: float = 1.0, backward_s: float = 2.0, **changes: Any) -> LayerMeasurement:
    fields = {"activation_bytes": 0, "peak_bytes": 0, "sent_bytes": 0, "gradient_bytes": 0}
    return LayerMeasurement(forward_s=forward_s, backward_s=backward_s, **(fields | changes))


def a_layer(name: str, one: LayerMeasurement | None = None, **changes: Any) -> LayerProfile:
    return LayerProfile(name=name, forward_flops=1.0, measured=one, **changes)


def a_cost(layers: list[LayerProfile]) -> CostModel:
    return CostModel(ModelProfile(layers=tuple(layers)))


def test_a_plan_is_balanced_by_them_and_says_so() -> None:
    profile = ModelProfile(layers=tuple(a_layer(str(index)) for index in range(4)))
    times = [measured(1, 1), measured(1, 1), measured(1, 1), measured(1, 5)]
    plan = make_plan(
        profile.with_measurements(times), num_stages=2, num_replicas=1, num_microbatches=4, module_fingerprint="x"
    )
    assert plan.partition.cut_points == (3,)
    assert [stage.microbatch_s for stage in plan.stage_predictions] == [6, 6]
    assert PipelinePlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="2 measurements for 4 layers"):
        profile.with_measurements(times[:2])


def test_without_measurements_nothing_is_predicted() -> None:
    options: dict[str, Any] = {
        "schedule": ScheduleSpec(name="1f1b"),
        "num_microbatches": 1,
        "optimizer_state_ratio": 2.0,
    }
    assert predict_stages(a_cost([a_layer("a")]), Partition(cut_points=(), num_layers=1), **options) == ()


def test_memory_by_hand() -> None:
    """Two stages, four micro-batches, 1F1B: two micro-batches are alive on stage 0, one on stage 1."""
    layers = [
        a_layer(
            "a",
            measured(activation_bytes=100, sent_kept_bytes=10, sent_bytes=10, gradient_bytes=10, peak_bytes=150),
            param_bytes=1000,
            trainable_bytes=600,
            parameters=("a", "shared"),
        ),
        a_layer(
            "b",
            measured(activation_bytes=60, received_kept_bytes=10, sent_bytes=8, gradient_bytes=4, peak_bytes=70),
            param_bytes=50,
            parameters=("b",),
        ),
        a_layer(
            "c",
            measured(activation_bytes=30, received_kept_bytes=8, peak_bytes=40),
            param_bytes=20,
            trainable_bytes=20,
            parameters=("c", "shared"),
            tied=(TiedParameter(name="shared", num_bytes=300, is_trainable=True),),
        ),
    ]
    first, last = predict_stages(
        a_cost(layers),
        Partition(cut_points=(2,), num_layers=3),
        schedule=ScheduleSpec(name="1f1b"),
        num_microbatches=4,
        optimizer_state_ratio=2.0,
    )
    assert (first.parameter_bytes, first.gradient_bytes, first.optimizer_bytes) == (1050, 600, 1200)
    assert first.activation_bytes == 100 + (60 - 10) + 8  # kept by both counts once; what is sent is held
    assert first.working_bytes == max(150 + 8, 100 + 70)
    assert first.buffer_bytes == 2 * 4  # gradients that may arrive early
    assert first.peak_bytes == 1050 + 600 + 1200 + 158 + 170 + 8
    assert (last.parameter_bytes, last.gradient_bytes, last.optimizer_bytes) == (320, 320, 640)
    profile = ModelProfile(layers=tuple(layers))
    given: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "module_fingerprint": "x", "partition": [2]}
    for num_replicas, share in ((1, 1200), (3, 400)):
        plan = make_plan(profile, num_replicas=num_replicas, shards_optimizer=True, **given)
        assert plan.stage_predictions[0].optimizer_bytes == share
        assert plan.stage_predictions[0].gradient_bytes == 600
    assert last.activation_bytes == 0
    assert last.working_bytes == 8 + 40
    assert last.buffer_bytes == 2 * 8 + 4 * 4


def test_a_copy_on_the_stage_that_counts_it_is_no_copy() -> None:
    tied = (TiedParameter(name="shared", num_bytes=300, is_trainable=False),)
    layers = [
        a_layer("a", measured(), param_bytes=300, parameters=("shared",)),
        a_layer("b", measured(), parameters=("shared",), tied=tied),
        a_layer("c", measured(), parameters=("shared",), tied=tied),
    ]
    options: dict[str, Any] = {
        "schedule": ScheduleSpec(name="gpipe"),
        "num_microbatches": 2,
        "optimizer_state_ratio": 2.0,
    }
    (whole,) = predict_stages(a_cost(layers), Partition(cut_points=(), num_layers=3), **options)
    assert whole.parameter_bytes == 300
    first, last = predict_stages(a_cost(layers), Partition(cut_points=(1,), num_layers=3), **options)
    assert (first.parameter_bytes, last.parameter_bytes) == (300, 300)
    assert last.gradient_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("forward_s", -1.0), ("backward_s", float("nan")), ("activation_bytes", -1), ("peak_bytes", 1.5)],
)
def test_impossible_measurements_are_refused(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"LayerMeasurement: {name} must be"):
        measured(**{name: value})
