from __future__ import annotations

from typing import Any

import pytest

from lightning_autopipe.core import ConfigurationError, LayerProfile, ModelProfile, Partition, PipelinePlan
from lightning_autopipe.planner import make_plan


def a_profile(*flops: float) -> ModelProfile:
    return ModelProfile(
        layers=tuple(LayerProfile(name=f"net.{index}", forward_flops=value) for index, value in enumerate(flops))
    )


def planned(profile: ModelProfile, **changes: Any) -> PipelinePlan:
    options: dict[str, Any] = {"num_stages": 2, "num_replicas": 1, "num_microbatches": 4, "module_fingerprint": "x"}
    return make_plan(profile, **(options | changes))


def test_layers_are_balanced_by_their_floating_point_operations() -> None:
    plan = planned(a_profile(1e9, 1e9, 1e9, 3e9), num_replicas=2)
    assert plan.partition.cut_points == (3,)
    assert plan.stage_work_shares == (0.5, 0.5)
    assert plan.layout.world_size == 4
    assert (plan.schedule.name, plan.num_microbatches) == ("1f1b", 4)
    assert PipelinePlan.from_json(plan.to_json()) == plan


def test_layers_without_counted_operations_weigh_the_same() -> None:
    assert planned(a_profile(0, 0, 0, 0)).partition.cut_points == (2,)


@pytest.mark.parametrize("partition", [[1], (1,), Partition(cut_points=(1,), num_layers=4)])
def test_a_given_partition_is_taken(partition: Any) -> None:
    plan = planned(a_profile(1, 1, 1, 1), partition=partition)
    assert plan.partition.cut_points == (1,)
    assert plan.stage_work_shares == (0.25, 0.75)


def test_layers_or_parameters_are_shared_evenly_on_request() -> None:
    bytes_by_layer = [100, 100, 400, 100, 100, 100]
    layers = tuple(
        LayerProfile(name=str(index), forward_flops=10.0**index, param_bytes=number)
        for index, number in enumerate(bytes_by_layer)
    )
    profile = ModelProfile(layers=layers)
    assert planned(profile, partition="uniform").partition.cut_points == (3,)
    assert planned(profile, partition="uniform", num_stages=4).partition.cut_points == (2, 4, 5)
    assert planned(profile, partition="parameters", num_stages=3).partition.cut_points == (2, 3)
    assert planned(profile).partition.cut_points == (5,)


def test_the_schedule_counts() -> None:
    """What 1F1B hides behind its warm-up and what GPipe hides are different."""
    profile = a_profile(4, 4, 1, 1, 3, 4)
    assert planned(profile, num_stages=3, num_microbatches=6).partition.cut_points == (2, 5)
    assert planned(profile, num_stages=3, num_microbatches=6, schedule="gpipe").partition.cut_points == (1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 5}, "num_stages=5 is more than the 4 layers"),
        ({"num_replicas": 0}, "num_replicas must be an integer >= 1"),
        (
            {"schedule": "1f2b"},
            "schedule='1f2b' is not known; set it to one of 'auto', '1f1b', 'gpipe', ",
        ),
        ({"schedule": "forward_only"}, "schedule='forward_only' is not known"),
        (
            {"partition": "even"},
            'partition must be "auto", "uniform", "parameters" or a list of cut points, got \'even\'',
        ),
        ({"partition": [4]}, r"partition=\(4,\) does not fit the module: .*allowed are 1 to 3"),
        ({"partition": [1, 2]}, r"has 3 stages, but num_stages is 2; give 1 cut point, or set num_stages=3"),
        ({"partition": Partition(cut_points=(1,), num_layers=5)}, "for 5 layers, but the module has 4"),
        (
            {"partition": [1, 2], "schedule": "interleaved_1f1b"},
            "has 3 stages, but num_stages is 2, each rank with 2; give 3 cut points, one fewer than a multiple of 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        planned(a_profile(1, 1, 1, 1), **changes)


def test_several_stages_a_rank_are_as_many_as_the_cuts_say() -> None:
    profile = a_profile(*[1] * 6)
    even = planned(profile, schedule="interleaved_1f1b")
    assert (even.schedule.stages_per_rank, even.partition.num_stages) == (2, 4)
    given = planned(profile, schedule="interleaved_1f1b", partition=[1, 2, 3, 4, 5])
    assert (given.schedule.stages_per_rank, given.stage_ranks(4)) == (3, given.stage_ranks(0))


def test_one_rank_takes_no_turns() -> None:
    alone = planned(a_profile(*[1] * 6), num_stages=1, schedule="interleaved_1f1b")
    assert (alone.schedule.stages_per_rank, alone.partition.num_stages) == (1, 1)


def test_slices_are_as_many_as_save_the_startup_of_even_stages() -> None:
    spec = planned(a_profile(*[1] * 6), num_stages=6, num_microbatches=8, schedule="sliced_1f1b").schedule
    assert (spec.num_sliced_first, spec.num_sliced_last) == (2, 2)
