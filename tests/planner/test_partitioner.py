"""The partition with the shortest simulated step, against brute force on the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import (
    ConfigurationError,
    CrossingValue,
    DeviceTimes,
    LayerMeasurement,
    LayerProfile,
    Link,
    ModelProfile,
    TiedParameter,
)
from lightning_autopipe.planner import CostModel
from lightning_autopipe.planner.depths import choose_partition_and_depths
from lightning_autopipe.planner.device_order import choose_device_order
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.schedules import default_depths
from tests.planner.steps import (
    a_device,
    a_profile,
    a_setting,
    brute_force,
    every_order,
    servers,
    simulated_s,
    the_reference_chain,
)

SAME = 1 + 1e-9
SECONDS = st.floats(0.01, 10.0)


def limited_profile(data: st.DataObject, num_layers: int) -> ModelProfile:
    """Layers of random times, parameters and activations, with a skip and a tie between random layers."""
    layers = []
    for index in range(num_layers):
        measured = LayerMeasurement(
            forward_s=data.draw(SECONDS),
            backward_s=data.draw(SECONDS),
            activation_bytes=data.draw(st.integers(0, 50)),
            peak_bytes=data.draw(st.integers(0, 80)),
            sent_bytes=0,
            gradient_bytes=0,
        )
        num_bytes = data.draw(st.integers(0, 40))
        layers.append(
            LayerProfile(
                name=str(index),
                forward_flops=1.0,
                param_bytes=num_bytes,
                trainable_bytes=num_bytes,
                parameters=(str(index),),
                measured=measured,
            )
        )
    user = data.draw(st.integers(1, num_layers - 1))
    tie = TiedParameter(name="0", num_bytes=layers[0].param_bytes, is_trainable=True)
    layers[user] = replace(layers[user], parameters=(str(user), "0"), tied=(tie,))
    values = [
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=4, gradient_bytes=4)
        for index in range(num_layers - 1)
    ]
    values.append(CrossingValue(producer=0, last_reader=user, forward_bytes=9, gradient_bytes=3))
    return ModelProfile(layers=tuple(layers), values=tuple(values))


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.data())
def test_it_is_never_above_brute_force(data: st.DataObject) -> None:
    """Random costs, speeds, memory limits and links; M = 2n, one replica, depth n - 1 - s, every order of devices."""
    num_layers = data.draw(st.integers(2, 8), label="layers")
    num_stages = data.draw(st.integers(1, min(4, num_layers)), label="stages")
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.3]), min_size=num_stages, max_size=num_stages))
    limits = data.draw(st.lists(st.integers(150, 1200), min_size=num_stages, max_size=num_stages))
    names = "ABCD"[:num_stages]
    bandwidth = data.draw(st.floats(1.0, 50.0))
    # A link for each pair, all alike: none is shared.
    links = [Link(a=a, b=b, bandwidth_bytes_per_s=bandwidth, latency_s=0.1) for a, b in combinations(names, 2)]
    network = servers(names, *links) if data.draw(st.booleans(), label="with links") else None
    devices = [
        a_device(rank, names[rank], relative_speed=speed, memory_bytes=limit)
        for rank, (speed, limit) in enumerate(zip(speeds, limits, strict=True))
    ]
    setting = a_setting(
        limited_profile(data, num_layers), num_stages, 2 * num_stages, devices=(tuple(devices),), network=network
    )
    in_order = brute_force([setting])
    settings_by_order = [replace(setting, devices=(order,)) for order in every_order(devices)]
    best = brute_force(settings_by_order)
    if in_order is None:
        with pytest.raises(ConfigurationError, match="no partition was found that fits the devices' memory"):
            choose_partition(setting)
    else:
        found = choose_partition(setting)
        assert found.is_exact
        assert simulated_s(setting, found.partition.cut_points) <= in_order * SAME
    if best is not None:
        ordered = choose_device_order(setting)
        assert sorted(device.global_rank for device in ordered.devices) == list(range(num_stages))
        chosen = replace(setting, devices=(ordered.devices,))
        assert not Objective(chosen).overflow_bytes(ordered.choice.partition.cut_points, ordered.choice.depths)
        assert simulated_s(chosen, ordered.choice.partition.cut_points) <= best * SAME


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_sizes_are_exact_too(seed: int) -> None:
    """12 layers, 4 stages on 4 devices of unlike speeds and memories."""
    import random

    chance = random.Random(seed)
    layers = []
    for index in range(12):
        measured = LayerMeasurement(
            forward_s=chance.random(),
            backward_s=2 * chance.random(),
            activation_bytes=chance.randint(0, 50),
            peak_bytes=chance.randint(0, 80),
            sent_bytes=0,
            gradient_bytes=0,
        )
        num_bytes = chance.randint(0, 40)
        layers.append(
            LayerProfile(
                name=str(index), forward_flops=1, param_bytes=num_bytes, trainable_bytes=num_bytes, measured=measured
            )
        )
    devices = tuple(
        a_device(rank, relative_speed=chance.choice([1.0, 0.5, 0.25]), memory_bytes=chance.choice([450, 700, 1500]))
        for rank in range(4)
    )
    setting = a_setting(ModelProfile(layers=tuple(layers)), 4, 8, devices=(devices,))
    # The simulator equals the recurrence here, which is quick enough for all 3,960.
    best, num_too_large, depths = math.inf, 0, default_depths(4)
    for order in every_order(devices):
        objective = Objective(replace(setting, devices=(order,)))
        for cuts in combinations(range(1, 12), 3):
            if objective.overflow_bytes(cuts, depths):
                num_too_large += 1
            else:
                best = min(best, objective.step_s(cuts, depths))
    assert num_too_large, "memory is to be a limit"
    assert math.isfinite(best)
    found = choose_device_order(setting)
    chosen = replace(setting, devices=(found.devices,))
    assert found.choice.is_exact
    assert not Objective(chosen).overflow_bytes(found.choice.partition.cut_points, depths)
    assert simulated_s(chosen, found.choice.partition.cut_points) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_no_bound_is_above_the_step(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(2, 9))
    num_stages = data.draw(st.integers(1, min(4, num_layers)))
    num_microbatches = data.draw(st.integers(1, 10))
    names = "ABCD"[:num_stages]
    links = [Link(a=a, b=b, bandwidth_bytes_per_s=10.0, latency_s=0.2) for a, b in combinations(names, 2)]
    devices = tuple(a_device(rank, name) for rank, name in enumerate(names))
    setting = a_setting(
        limited_profile(data, num_layers),
        num_stages,
        num_microbatches,
        devices=(devices,),
        network=servers(names, *links),
        exchange_s=0.5,
    )
    objective = Objective(setting)
    depths = tuple(sorted(data.draw(st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages)))[::-1])
    for cuts in list(combinations(range(1, num_layers), num_stages - 1))[:20]:
        step_s = objective.step_s(cuts, depths)
        assert objective.bound_s(cuts, depths) <= step_s * SAME
        assert simulated_s(setting, cuts, depths) == pytest.approx(step_s, rel=1e-12)


@pytest.mark.parametrize(("num_stages", "best_s"), [(8, 452_810), (16, 485_430)])
def test_the_reference_chain_at_plain_depth(num_stages: int, best_s: float) -> None:
    setting = a_setting(the_reference_chain(), num_stages, 2 * num_stages)
    found = choose_partition(setting)
    assert found.step_s == best_s
    assert simulated_s(setting, found.partition.cut_points) == best_s


@pytest.mark.parametrize(("num_stages", "at_most_s"), [(8, 414_010), (16, 449_390)])
def test_the_reference_chain_with_depths_free(num_stages: int, at_most_s: float) -> None:
    setting = a_setting(the_reference_chain(), num_stages, 2 * num_stages)
    found = choose_partition_and_depths(setting)
    assert found.step_s <= at_most_s
    assert simulated_s(setting, found.partition.cut_points, found.depths) == found.step_s


def test_memory_bounds_the_depths() -> None:
    """Each layer keeps 10 bytes a micro-batch; a stage of two layers has room for three micro-batches."""
    measured = LayerMeasurement(
        forward_s=1.0, backward_s=2.0, activation_bytes=10, peak_bytes=10, sent_bytes=0, gradient_bytes=0
    )
    layers = tuple(LayerProfile(name=str(index), forward_flops=1.0, measured=measured) for index in range(8))
    devices = tuple(a_device(rank, memory_bytes=60) for rank in range(4))
    setting = a_setting(ModelProfile(layers=layers), 4, 8, devices=(devices,))
    with pytest.raises(ConfigurationError, match=r"micro-batches in flight\); set more stages"):
        choose_partition(setting, depths=(7, 7, 7, 7))
    found = choose_partition_and_depths(setting)
    assert not Objective(setting).overflow_bytes(found.partition.cut_points, found.depths)
    roomy = choose_partition_and_depths(replace(setting, devices=()))
    assert roomy.step_s <= found.step_s
    assert max(found.depths) <= 5


def test_depths_hide_slow_links() -> None:
    """A,A,B,B over a slow link: 890 at plain depth; 610 is the bound (algorithms of warm-up depth)."""
    links = [Link(a="A", b="B", bandwidth_bytes_per_s=1.0)]
    devices = tuple(a_device(rank, server) for rank, server in enumerate("AABB"))
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=20, gradient_bytes=20) for index in range(3)
    )
    profile = a_profile([10] * 4, [20] * 4, values=values)
    setting = a_setting(profile, 4, 16, devices=(devices,), network=servers("AABB", *links))
    assert choose_partition(setting).step_s == 890
    found = choose_partition_and_depths(setting)
    assert found.step_s == 610
    assert sum(found.depths) <= sum((5, 4, 1, 0))


def test_depths_begin_with_what_crossings_last() -> None:
    """Eight stages on three servers in a row; the slopes of the depth alone lead to 645 at best."""
    links = [Link(a=a, b=b, bandwidth_bytes_per_s=1.0) for a, b in ("AB", "BC")]
    names = "AABBCCCC"
    devices = tuple(a_device(rank, server) for rank, server in enumerate(names))
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=20, gradient_bytes=20) for index in range(23)
    )
    forward_s = [2 + (7 * index % 5) / 5 for index in range(24)]
    profile = a_profile(forward_s, [2 * seconds for seconds in forward_s], values=values)
    setting = a_setting(profile, 8, 16, devices=(devices,), network=servers(names, *links))
    found = choose_partition_and_depths(setting)
    assert found.step_s < 600
    assert found.step_s == pytest.approx(simulated_s(setting, found.partition.cut_points, found.depths))


def test_depths_hide_slow_links_of_few_microbatches() -> None:
    """Four micro-batches over a slow cut: there are few choices of depths, and none is better."""
    links = [Link(a="A", b="B", bandwidth_bytes_per_s=1.0)]
    devices = tuple(a_device(rank, server) for rank, server in enumerate("AABB"))
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=20, gradient_bytes=20) for index in range(11)
    )
    profile = a_profile([2] * 12, [4] * 12, values=values)
    setting = a_setting(profile, 4, 4, devices=(devices,), network=servers("AABB", *links))
    found = choose_partition_and_depths(setting)
    every = [
        choose_partition(setting, depths=depths).step_s
        for depths in product(range(4), repeat=4)
        if list(depths) == sorted(depths, reverse=True)
    ]
    assert found.is_exact
    assert found.step_s == min(every)
    searched = choose_partition_and_depths(setting, max_exact=100)
    assert not searched.is_exact
    assert searched.step_s <= 1.02 * found.step_s


def test_shared_links_are_simulated() -> None:
    """A,B,A,B: three boundaries on one link. What is promised is what the simulator says of shared links."""
    links = [Link(a="A", b="B", bandwidth_bytes_per_s=1.0)]
    devices = tuple(a_device(rank, server) for rank, server in enumerate("ABAB"))
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=20, gradient_bytes=20) for index in range(7)
    )
    profile = a_profile([5] * 8, [10] * 8, values=values)
    setting = a_setting(profile, 4, 8, devices=(devices,), network=servers("ABAB", *links))
    objective = Objective(setting)
    assert objective.shares_links
    found = choose_partition(setting)
    assert found.is_exact
    assert found.step_s == simulated_s(setting, found.partition.cut_points) == brute_force([setting])
    assert found.step_s > objective.step_s(found.partition.cut_points, found.depths)
    deeper = choose_partition_and_depths(setting)
    assert deeper.step_s == simulated_s(setting, deeper.partition.cut_points, deeper.depths) < found.step_s


def test_memory_is_a_limit_on_shared_links_too() -> None:
    measured = LayerMeasurement(
        forward_s=1.0, backward_s=2.0, activation_bytes=10, peak_bytes=10, sent_bytes=5, gradient_bytes=5
    )
    layers = tuple(LayerProfile(name=str(index), forward_flops=1.0, measured=measured) for index in range(8))
    links = [Link(a="A", b="B", bandwidth_bytes_per_s=3.0)]
    for limits in ((300, 75, 300, 300), (75, 300, 300, 300), (400, 400, 400, 60)):
        devices = tuple(a_device(rank, "ABAB"[rank], memory_bytes=limits[rank]) for rank in range(4))
        network = servers("ABAB", *links)
        setting = a_setting(ModelProfile(layers=layers), 4, 8, devices=(devices,), network=network)
        best = brute_force([setting])
        if best is None:
            with pytest.raises(ConfigurationError, match="no partition was found that fits"):
                choose_partition(setting)
        else:
            found = choose_partition(setting)
            assert not Objective(setting).overflow_bytes(found.partition.cut_points, found.depths)
            assert found.step_s == best


def test_unlike_devices_get_unlike_work() -> None:
    devices = tuple(a_device(rank, relative_speed=speed) for rank, speed in enumerate((1.0, 0.25)))
    setting = a_setting(a_profile([1.0] * 10, [2.0] * 10), 2, 20, devices=(devices,))
    assert choose_partition(setting).partition.cut_points == (8,)
    models = (
        DeviceTimes(device_model="fast", microbatch_size=1, forward_s=(1.0,) * 10, backward_s=(2.0,) * 10),
        DeviceTimes(device_model="slow", microbatch_size=1, forward_s=(4.0,) * 10, backward_s=(8.0,) * 10),
    )
    layers = tuple(LayerProfile(name=str(index), forward_flops=1.0) for index in range(10))
    by_model = a_setting(
        ModelProfile(layers=layers, times=models),
        2,
        20,
        devices=((replace(devices[0], model="slow", relative_speed=9.0), replace(devices[1], model="fast")),),
    )
    assert choose_partition(by_model).partition.cut_points == (2,)


def two_replicas(profile: ModelProfile, num_microbatches: tuple[int, int]) -> PipelineSetting:
    devices = (
        (a_device(0, "A"), a_device(1, "A")),
        (a_device(2, "B", relative_speed=0.5), a_device(3, "B", relative_speed=0.5)),
    )
    network = servers("AABB", Link(a="A", b="B", bandwidth_bytes_per_s=4.0, latency_s=0.5))
    return PipelineSetting(
        cost=CostModel(profile),
        num_stages=2,
        num_microbatches=num_microbatches,
        devices=devices,
        network=network,
        exchange_s=0.25,
    )


def test_replicas_reductions_ties_and_optimizers_are_priced() -> None:
    times = DeviceTimes(
        device_model="the profiled one",
        microbatch_size=1,
        forward_s=(1.0, 1.0, 1.0),
        backward_s=(2.0, 2.0, 2.0),
        optimizer_s=(0.5, 0.25, 0.125),
    )
    tie = TiedParameter(name="w", num_bytes=8, is_trainable=True)
    layers = (
        LayerProfile(name="0", forward_flops=1.0, param_bytes=8, trainable_bytes=8, parameters=("w",)),
        LayerProfile(name="1", forward_flops=1.0, param_bytes=4, trainable_bytes=4, parameters=("v",)),
        LayerProfile(name="2", forward_flops=1.0, parameters=("w",), tied=(tie,)),
    )
    setting = two_replicas(ModelProfile(layers=layers, times=(times,)), (4, 2))
    # Slow replica, stage 0: F0 0-4, F1 4-8, B0 10-18 (stage 1: F0 4-6, B0 6-10), B1 18-26. The fast one ends at 25.
    # Ties: 8 bytes in a ring of four, 6 pieces of 2 bytes, each with 0.5 s of latency: 3 s + 3 s. Then stage 0 sums its
    # other 4 bytes: 2 pieces of 2 bytes: 1 s + 1 s. The exchange: 0.25 s. The optimizer of the slow devices: 1.5 s.
    assert Objective(setting).step_s((2,), (1, 0)) == 26 + 6 + 2 + 0.25 + 1.5
    assert simulated_s(setting, (2,)) == 26 + 6 + 2 + 0.25 + 1.5


@pytest.mark.parametrize("num_stages", [4, 16])
@pytest.mark.parametrize("num_layers", [16, 30, 42])
def test_even_layers_stay_as_even_as_the_step_allows(num_layers: int, num_stages: int) -> None:
    """Every layer is on one stage, none is empty, and no even partition is faster."""
    setting = a_setting(a_profile([1.0] * num_layers, [2.0] * num_layers), num_stages, 2 * num_stages)
    found = choose_partition(setting)
    stages = [len(found.partition.stage_layers(stage)) for stage in range(num_stages)]
    assert sum(stages) == num_layers
    assert min(stages) >= 1
    assert max(stages) == math.ceil(num_layers / num_stages)


@pytest.mark.parametrize(
    ("costs", "num_stages"), [([1] * 5, 4), ([1000] + [1] * 7, 3), ([10, 20, 30, 40], 4), ([0, 0, 0], 3), ([5], 1)]
)
def test_no_stage_is_empty(costs: list[int], num_stages: int) -> None:
    setting = a_setting(a_profile(costs, costs), num_stages, 4)
    partition = choose_partition(setting).partition
    owned = [list(partition.stage_layers(stage)) for stage in range(num_stages)]
    assert all(owned)
    assert [layer for layers in owned for layer in layers] == list(range(len(costs)))


def test_more_stages_than_layers_are_refused() -> None:
    setting = a_setting(a_profile([1] * 5, [1] * 5), 6, 4)
    for choose in (choose_partition, choose_partition_and_depths):
        with pytest.raises(ConfigurationError, match=r"num_stages=6 is more than the 5 layers .* at most 5"):
            choose(setting)  # type: ignore[operator]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages(num_microbatches: int) -> None:
    forward_s, backward_s = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], [2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
    setting = a_setting(a_profile(forward_s, backward_s), 4, num_microbatches)
    found = choose_partition(setting)
    assert simulated_s(setting, found.partition.cut_points) == brute_force([setting])


def test_a_search_finds_what_looking_at_all_finds() -> None:
    """The moves alone, on chains where all 1,365 partitions can be looked at."""
    import random

    chance = random.Random(7)
    gaps = []
    for _ in range(15):
        forward_s = [chance.random() for _ in range(16)]
        setting = a_setting(a_profile(forward_s, [2 * seconds for seconds in forward_s]), 5, 10)
        exact, searched = choose_partition(setting), choose_partition(setting, max_exact=0)
        assert exact.is_exact
        assert not searched.is_exact
        gaps.append(searched.step_s / exact.step_s - 1)
    assert max(gaps) < 0.02
    assert sorted(gaps)[len(gaps) // 2] < 1e-9


def test_two_servers_of_four_against_brute_force() -> None:
    """Up to 8 layers on 2 servers x 4 devices: every device is used where there are as many layers."""
    names = "AAAABBBB"
    devices = tuple(a_device(rank, server, relative_speed=1.0) for rank, server in enumerate(names))
    network = servers(names, Link(a="A", b="B", bandwidth_bytes_per_s=2.0))
    costs: dict[str, Any] = {"forward_s": [3, 1, 4, 1, 5, 9, 2, 6], "backward_s": [2, 7, 1, 8, 2, 8, 1, 8]}
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=index, gradient_bytes=index)
        for index in range(7)
    )
    profile = a_profile(**costs, values=values)
    for num_stages in (2, 4, 8):
        chosen = tuple(devices[index * 8 // num_stages] for index in range(num_stages))
        setting = a_setting(profile, num_stages, 6, devices=(chosen,), network=network)
        found = choose_partition(setting)
        assert simulated_s(setting, found.partition.cut_points) == brute_force([setting])
        assert found.partition.num_stages == num_stages
