"""The search over layouts, numbers of micro-batches and schedules, and the plan of what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopipe.core import (
    ClusterTopology,
    ConfigurationError,
    CrossingValue,
    DeviceTimes,
    LayerMeasurement,
    LayerProfile,
    ModelProfile,
    PipelinePlan,
)
from lightning_autopipe.planner import CostModel, SearchSpace, alike_devices, plan_of, search, simulate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.microbatches import microbatch_counts
from lightning_autopipe.planner.plan_step import plan_step
from tests.planner.mappings import a_cluster

NUM_LAYERS = 8


def a_profile(
    *,
    sizes: Sequence[float] = (1, 2, 4, 8),
    fixed: float = 0.0,
    value_bytes: int = 0,
    gradient_bytes: int = 0,
    activation_bytes: int = 0,
    models: dict[str, float] | None = None,
) -> ModelProfile:
    """Eight alike layers that take a fixed share, and one unit of time for each sample forward and two backward."""
    measured = LayerMeasurement(
        forward_s=fixed + sizes[-1],
        backward_s=2 * (fixed + sizes[-1]),
        activation_bytes=activation_bytes,
        peak_bytes=activation_bytes,
        sent_bytes=value_bytes,
        gradient_bytes=value_bytes,
    )
    times = tuple(
        DeviceTimes(
            device_model=model,
            microbatch_size=size,
            forward_s=((fixed + size) / speed,) * NUM_LAYERS,
            backward_s=(2 * (fixed + size) / speed,) * NUM_LAYERS,
        )
        for model, speed in (models or {"gpu": 1.0}).items()
        for size in sizes
    )
    layer: dict[str, Any] = {"forward_flops": 1.0, "param_bytes": gradient_bytes, "trainable_bytes": gradient_bytes}
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=value_bytes, gradient_bytes=value_bytes)
        for index in range(NUM_LAYERS - 1)
    )
    return ModelProfile(
        layers=tuple(LayerProfile(name=str(index), measured=measured, **layer) for index in range(NUM_LAYERS)),
        values=values,
        times=times,
        microbatch_size=sizes[-1],
    )


def space(profile: ModelProfile, topology: ClusterTopology | None = None, **changes: Any) -> SearchSpace:
    network = alike_devices(4) if topology is None else LinkNetwork(topology)
    options: dict[str, Any] = {"batch_size": 8.0, "optimizer_state_ratio": 0.0, "kinds": ()}
    return SearchSpace(cost=CostModel(profile), network=network, **(options | changes))


def with_slow_server(topology: ClusterTopology) -> ClusterTopology:
    """The same, with another device model in the servers after the first."""
    devices = (device if device.server == "A" else replace(device, model="slow") for device in topology.devices)
    return replace(topology, devices=tuple(devices))


def layout(plan_or_candidate: Any) -> tuple[int, int]:
    counts = plan_or_candidate.replica_counts
    assert len(set(counts)) == 1
    return len(counts), counts[0]


def test_plain_data_parallelism_where_nothing_hinders_it() -> None:
    """Four alike devices, links that take no time, small sizes that cost more: whole batches, four replicas."""
    found = search(space(a_profile(fixed=1.0)))
    assert layout(found.best) == (1, 4)
    assert found.best.num_microbatches == 1
    assert found.best.step_s == pytest.approx(8 * 3 * 9.0)
    assert found.best.num_samples == 32
    assert found.best.samples_per_s > max(candidate.samples_per_s for candidate in found.runners_up)


def test_a_pipeline_where_gradients_are_large_and_links_slow() -> None:
    """Gradients take a hundred seconds to sum, values a tenth to send."""
    topology = a_cluster("ABCD", bandwidth=1.0)
    found = search(space(a_profile(gradient_bytes=100), topology))
    assert layout(found.best) == (4, 1)
    assert {layout(candidate) for candidate in found.runners_up} <= {(1, 4), (2, 2), (4, 1)}


def test_memory_decides_too() -> None:
    """A device holds the activations of one sample in all layers, or of four in two of them."""
    topology = a_cluster("AAAA", memory_bytes=800)
    profile = a_profile(gradient_bytes=50, activation_bytes=10)
    assert layout(search(space(profile, topology, num_microbatches=8)).best) == (2, 2)
    assert layout(search(space(profile, topology, num_microbatches=8, memory_share=0.45)).best) == (4, 1)
    with pytest.raises(ConfigurationError, match="fits the devices' memory"):
        search(space(a_profile(gradient_bytes=1000), topology))


def test_given_numbers_are_kept() -> None:
    assert layout(search(space(a_profile(fixed=1.0), num_stages=2)).best) == (2, 2)
    assert layout(search(space(a_profile(fixed=1.0), num_replicas=1)).best) == (4, 1)
    found = search(space(a_profile(fixed=1.0), num_stages=4, num_microbatches=2)).best
    assert (layout(found), found.num_microbatches, found.microbatch_size) == ((4, 1), 2, 4.0)
    cuts = search(space(a_profile(), cuts=(1,))).best
    assert (layout(cuts), cuts.partition.cut_points) == ((2, 2), (1,))


def test_replicas_are_as_many_as_the_data_can_be_shared_by() -> None:
    assert layout(search(space(a_profile(fixed=1.0), possible_replicas=(1, 2))).best) == (2, 2)
    with pytest.raises(ConfigurationError, match=r"num_stages=1 .*the data can be shared by 1, 2\)"):
        space(a_profile(), num_stages=1, possible_replicas=(1, 2))


def test_more_micro_batches_as_long_as_small_ones_do_not_cost_more() -> None:
    linear = search(space(a_profile(), num_stages=4)).best
    assert linear.num_microbatches == 8
    # 4 + 3 forwards and backwards of 2 samples and a fixed part, against 8 + 3 of 1.
    dear = search(space(a_profile(fixed=2.0), num_stages=4)).best
    assert dear.num_microbatches in (2, 4)


def test_of_about_equal_ones_the_fewest_micro_batches() -> None:
    """One stage has no bubble: nothing is gained by splitting the batch."""
    found = search(space(a_profile(), num_stages=1))
    assert found.best.num_microbatches == 1


def test_deeper_warm_ups_hide_slow_links_and_are_told() -> None:
    """Two servers, and a crossing there and back that takes as long as a stage's work."""
    profile = a_profile(sizes=(1, 2), value_bytes=12)
    topology = a_cluster("AABB", bandwidth=2.0)
    found = search(space(profile, topology, num_stages=4, num_microbatches=16, batch_size=16.0)).best
    assert found.schedule.name == "1f1b"
    assert found.schedule.depths
    assert found.step_s < 0.95 * found.plain_step_s
    plain = search(space(profile, topology, num_stages=4, num_microbatches=16, batch_size=16.0, schedule="1f1b")).best
    assert plain.schedule.depths == ()
    assert plain.step_s > found.step_s


def test_slices_only_where_they_may_be_run() -> None:
    """Halves cost little more than half, two times as many micro-batches cannot be made: slices pay."""
    options: dict[str, Any] = {"num_stages": 4, "num_microbatches": 4, "batch_size": 8.0}
    whole = search(space(a_profile(fixed=0.1), **options)).best
    sliced = search(space(a_profile(fixed=0.1), kinds=("sliced_1f1b",), **options)).best
    assert not whole.schedule.is_sliced
    assert sliced.schedule.is_sliced
    assert sliced.step_s < whole.step_s
    assert simulate(sliced.work).step_s == sliced.step_s


def test_gpipe_keeps_all_micro_batches() -> None:
    found = search(space(a_profile(), num_stages=4, schedule="gpipe")).best
    assert found.schedule.name == "gpipe"
    forwards = [str(action) for action in found.work.schedules[0].actions_by_rank[0][: found.num_microbatches]]
    assert all("F" in action for action in forwards)


def test_unlike_replicas_take_unlike_numbers_where_that_can_be_run() -> None:
    topology = with_slow_server(a_cluster("AABB"))
    options: dict[str, Any] = {"num_stages": 1, "num_microbatches": 5}
    profile = a_profile(models={"gpu": 1.0, "slow": 0.25})
    equal = search(space(profile, topology, **options)).best
    unlike = search(space(profile, topology, equal_shares=False, **options)).best
    assert equal.replica_microbatches == ()
    assert sorted(unlike.replica_microbatches) == [2, 2, 8, 8]
    assert unlike.step_s < 0.5 * equal.step_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 3}, "num_stages=3 x num_replicas=auto does not use the 4 devices"),
        ({"num_stages": 2, "num_replicas": 4}, "product is 4"),
        ({"cuts": (1,), "num_stages": 4}, "1 cuts make 2 stages, but num_stages is 4"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is not known"),
        ({"memory_share": 0.0}, "memory_share must be above 0"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        space(a_profile(), **changes)


def test_sizes_that_were_not_measured_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"num_microbatches=2\): measured are 1 to 8"):
        search(space(a_profile(), num_microbatches=2, batch_size=64.0))


@pytest.mark.parametrize(
    ("batch_size", "num_stages", "expected"),
    [(8.0, 4, (1, 2, 4, 8)), (7.0, 4, (1, 7)), (16.0, 1, (2, 4, 8, 16)), (11.0, 2, (11,))],
)
def test_numbers_of_micro_batches(batch_size: float, num_stages: int, expected: tuple[int, ...]) -> None:
    """Sizes from 1 to 8 are known."""
    counts = microbatch_counts(CostModel(a_profile()), batch_size=batch_size, num_stages=num_stages)
    assert counts == expected


# The plan ------------------------------------------------------------------


def a_plan(given: SearchSpace) -> PipelinePlan:
    return plan_of(search(given), given, module_fingerprint="x", devices=given.topology.devices)


@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({"num_stages": 4}, None),
        ({"num_stages": 2, "equal_shares": False}, {"gpu": 1.0, "slow": 0.5}),
        ({"num_stages": 4, "num_microbatches": 4, "kinds": ("sliced_1f1b",)}, None),
    ],
)
def test_the_plan_gives_the_step_that_was_found(changes: dict[str, Any], models: dict[str, float] | None) -> None:
    """From its file, on its cluster: the same step as in the search, and all that was predicted."""
    topology = a_cluster("AABB", bandwidth=100.0)
    if models:
        topology = with_slow_server(topology)
    given = space(a_profile(fixed=0.1, value_bytes=10, gradient_bytes=50, models=models), topology, **changes)
    found = search(given).best
    plan = a_plan(given)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert plan.step_prediction is not None
    assert plan.step_prediction.step_s == found.step_s
    again = simulate(plan_step(PipelinePlan.from_json(plan.to_json()), cluster=topology))
    assert again.step_s == pytest.approx(found.step_s, rel=1e-12)
    assert sum(plan.stage_work_shares) == pytest.approx(1)
    assert [runner_up.samples_per_s for runner_up in plan.runners_up] == sorted(
        (runner_up.samples_per_s for runner_up in plan.runners_up), reverse=True
    )


# Unlike numbers of replicas for stages -------------------------------------


def with_a_heavy_layer(profile: ModelProfile, factor: float = 8.0) -> ModelProfile:
    """The first layer takes more time, and its gradients are few."""
    tables = tuple(
        replace(
            table,
            forward_s=(factor * table.forward_s[0], *table.forward_s[1:]),
            backward_s=(factor * table.backward_s[0], *table.backward_s[1:]),
        )
        for table in profile.times
    )
    first = replace(profile.layers[0], param_bytes=0, trainable_bytes=0)
    return replace(profile, times=tables, layers=(first, *profile.layers[1:]))


def unlike_space(*, value_bytes: int = 2, **changes: Any) -> SearchSpace:
    """Three servers: a layer as dear as all others, and gradients that are slow to sum."""
    topology = a_cluster("ABC", bandwidth=20.0)
    options: dict[str, Any] = {"batch_size": 24.0, "batch_of": "step", "equal_counts": False}
    profile = with_a_heavy_layer(a_profile(value_bytes=value_bytes, gradient_bytes=400, activation_bytes=10), 14.0)
    return space(profile, topology, **(options | changes))


def test_unlike_numbers_of_replicas_compete_where_they_may() -> None:
    """Two devices for the dear layer, one for all others, against one device each or all gradients summed."""
    equal, found = search(unlike_space(equal_counts=True)), search(unlike_space())
    assert found.best.replica_counts == (2, 1)
    assert found.best.step_s == simulate(found.best.work).step_s
    assert found.best.samples_per_s > 1.2 * equal.best.samples_per_s
    assert equal.best.samples_per_s in [candidate.samples_per_s for candidate in found.runners_up]
    # A number of stages that does not divide the devices.
    assert search(unlike_space(num_stages=2)).best.replica_counts == (2, 1)
    with pytest.raises(ConfigurationError, match="does not use the 3 devices"):
        unlike_space(num_stages=2, equal_counts=True)
    with pytest.raises(ConfigurationError, match="give that of the step"):
        unlike_space(batch_of="replica")


@pytest.mark.parametrize("num_microbatches", [24, 8])
def test_a_plan_with_unlike_numbers_gives_the_step_that_was_found(num_microbatches: int) -> None:
    """Also with windows of its own, which few micro-batches call for."""
    given = unlike_space(value_bytes=40, num_stages=2, num_microbatches=num_microbatches)
    found = search(given).best
    assert found.schedule.depths == ((4, 0) if num_microbatches == 8 else ())
    assert (found.step_s < found.plain_step_s) == bool(found.schedule.depths)
    plan = a_plan(given)
    again = simulate(plan_step(PipelinePlan.from_json(plan.to_json()), cluster=given.topology))
    assert again.step_s == pytest.approx(found.step_s, rel=1e-12)
    peak_bytes = simulate(found.work).peak_bytes
    assert [stage.peak_bytes for stage in plan.stage_predictions] == [
        max(peak_bytes[rank] for rank in ranks) for ranks in plan.mapping.stage_ranks
    ]
    # Without links, but on the same devices.
    assert simulate(plan_step(plan)).step_s < found.step_s


def test_a_profile_in_which_nothing_takes_time_is_refused() -> None:
    profile = a_profile()
    nothing = tuple(
        replace(table, forward_s=(0.0,) * NUM_LAYERS, backward_s=(0.0,) * NUM_LAYERS) for table in profile.times
    )
    with pytest.raises(ConfigurationError, match="all layers of the profile take 0 seconds"):
        space(replace(profile, times=nothing))
