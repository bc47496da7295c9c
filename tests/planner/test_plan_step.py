from __future__ import annotations

from typing import Any

import pytest

from lightning_autopipe.core import (
    ClusterTopology,
    ConfigurationError,
    Device,
    LayerMeasurement,
    LayerProfile,
    Link,
    ModelProfile,
    PipelinePlan,
)
from lightning_autopipe.planner import make_plan, simulate
from lightning_autopipe.planner.plan_step import boundary_bytes, plan_step


def a_plan(num_layers: int = 4, *, is_measured: bool = True, **sizes: Any) -> PipelinePlan:
    measured = LayerMeasurement(
        forward_s=0.01, backward_s=0.03, activation_bytes=0, peak_bytes=0, sent_bytes=1000, gradient_bytes=500
    )
    layer = {"forward_flops": 2.0, "param_bytes": 100, "trainable_bytes": 100}
    layers = tuple(
        LayerProfile(name=str(index), measured=measured if is_measured else None, **layer)  # type: ignore[arg-type]
        for index in range(num_layers)
    )
    settings = {"num_stages": 2, "num_replicas": 1, "num_microbatches": 3} | sizes
    return make_plan(ModelProfile(layers=layers), module_fingerprint="x", **settings)  # type: ignore[arg-type]


def a_cluster(world_size: int, *, speed_of_last: float = 1.0) -> ClusterTopology:
    return ClusterTopology(
        devices=tuple(
            Device(
                global_rank=rank,
                server="A",
                model="gpu",
                memory_bytes=1 << 30,
                relative_speed=speed_of_last if rank == world_size - 1 else 1.0,
            )
            for rank in range(world_size)
        ),
        links=tuple(Link(a=f"rank {rank}", b="switch", bandwidth_bytes_per_s=1e6) for rank in range(world_size)),
    )


@pytest.mark.parametrize(("schedule_name", "last_of_stage_0"), [("1f1b", "0B2"), ("gpipe", "0B2")])
def test_a_plan_is_simulated_by_its_own_schedule(schedule_name: str, last_of_stage_0: str) -> None:
    step = plan_step(a_plan(schedule=schedule_name))
    assert [schedule.name for schedule in step.schedules] == [schedule_name]
    timeline = simulate(step)
    # Warm-up of one forward, three micro-batches on the last stage, and one backward.
    assert timeline.step_s == pytest.approx(0.02 + 3 * 0.08 + 0.06)
    of_stage_0 = [str(event.action) for event in timeline.events if event.global_rank == 1]
    assert of_stage_0[5] == last_of_stage_0
    forwards_first = of_stage_0[:3] == ["0F0", "0F1", "0F2"]
    assert forwards_first == (schedule_name == "gpipe")


def test_bytes_across_a_cut_are_those_of_activations_and_of_gradients_back() -> None:
    assert boundary_bytes(plan_step(a_plan())) == ((1000, 500),)
    assert boundary_bytes(plan_step(a_plan(num_stages=1))) == ()


def test_a_cluster_has_speeds_and_links() -> None:
    plan = a_plan(num_replicas=2)
    alone, linked = simulate(plan_step(plan)), simulate(plan_step(plan, cluster=a_cluster(4)))
    slow = simulate(plan_step(plan, cluster=a_cluster(4, speed_of_last=0.5)))
    assert alone.step_s < linked.step_s < slow.step_s
    # Rank 3 is stage 0 of replica 1.
    of_rank_3 = [event.end_s - event.start_s for event in slow.events if event.global_rank == 3]
    assert of_rank_3[0] == pytest.approx(0.04)


def test_a_cluster_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"2 ranks \(2 stages x 1 replicas\), but the cluster has 3 devices"):
        plan_step(a_plan(), cluster=a_cluster(3))


def test_without_measurements_a_micro_batch_takes_a_second() -> None:
    step = plan_step(a_plan(is_measured=False))
    units = [stage.units[0] for stage in step.stages[0]]
    assert sum(unit.forward_s + unit.backward_s for unit in units) == pytest.approx(1)
    assert units[0].backward_s == pytest.approx(2 * units[0].forward_s)
