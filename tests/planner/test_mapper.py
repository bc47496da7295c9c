"""Devices for stages: never above brute force on small clusters, hand cases, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import (
    ClusterTopology,
    ConfigurationError,
    CrossingValue,
    DeviceMapping,
    LayerProfile,
    Link,
    ModelProfile,
    ParallelLayout,
    PlanError,
)
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.contention import link_loads
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import MappingChoice, choose_mapping
from lightning_autopipe.planner.mapping_bound import MappingBound
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.placements import Grid, placements, with_rank_0_last
from lightning_autopipe.planner.shares import share_microbatches
from lightning_autopipe.planner.symmetry import Symmetries, distinct_orders, twin_classes
from tests.planner.steps import a_device, a_profile

SAME = 1 + 1e-9


def a_cluster(names: str, speeds: Sequence[float] = (), bandwidth: float = 1.0, **changes: float) -> ClusterTopology:
    """Servers of one letter each, ``"AABB"``, on a switch; devices in one server reach each other in no time."""
    devices = tuple(
        a_device(rank, server, relative_speed=speeds[rank] if speeds else 1.0, **changes)
        for rank, server in enumerate(names)
    )
    links = tuple(Link(a=name, b="switch", bandwidth_bytes_per_s=bandwidth) for name in dict.fromkeys(names))
    return ClusterTopology(devices=devices, links=links)


def a_model(
    times: Sequence[float], *, num_bytes: int = 0, gradient_bytes: int = 0, value_bytes: Sequence[int] = ()
) -> ModelProfile:
    """Layers of which backwards take twice as long as forwards."""
    sizes = value_bytes or [num_bytes] * (len(times) - 1)
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=size, gradient_bytes=size)
        for index, size in enumerate(sizes)
    )
    layers = tuple(
        LayerProfile(name=str(index), forward_flops=1.0, param_bytes=gradient_bytes, trainable_bytes=gradient_bytes)
        for index in range(len(times))
    )
    return a_profile(times, [2 * seconds for seconds in times], values=values, layers=layers)


def a_mapping_setting(
    profile: ModelProfile, topology: ClusterTopology, num_stages: int, num_replicas: int, num_microbatches: int
) -> MappingSetting:
    return MappingSetting(
        cost=CostModel(profile),
        network=LinkNetwork(topology),
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
    )


def simulated_s(setting: MappingSetting, grid: Grid, cuts: tuple[int, ...], shares: tuple[int, ...]) -> float:
    return simulate(Objective(setting.pipelines(grid, shares)).step_work(cuts, setting.depths)).step_s


def every_mapping(setting: MappingSetting, *, keeps_rank_0: bool) -> list[Grid]:
    """All grids, those that mirror others included."""
    num_stages, num_devices = setting.num_stages, setting.num_stages * setting.num_replicas
    grids = []
    for order in permutations(range(setting.topology.world_size), num_devices):
        grid = tuple(order[begin : begin + num_stages] for begin in range(0, num_devices, num_stages))
        if not keeps_rank_0 or grid[0][-1] == 0:
            grids.append(grid)
    return grids


def brute_force(setting: MappingSetting, *, keeps_rank_0: bool) -> float:
    prices = MappingPrices(setting)
    best_s = math.inf
    for grid in every_mapping(setting, keeps_rank_0=keeps_rank_0):
        for cuts in combinations(range(1, setting.cost.num_layers), setting.num_stages - 1):
            best_s = min(best_s, simulated_s(setting, grid, cuts, prices.shares(grid, cuts)))
    return best_s


def drawn_servers(data: st.DataObject, names: str, num_devices: int) -> tuple[str, list[float]]:
    size = {"min_size": num_devices, "max_size": num_devices}
    drawn = data.draw(st.text(names, **size), label="servers")
    return drawn, data.draw(st.lists(st.sampled_from([1.0, 0.5]), **size), label="speeds")


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_small_clusters_are_as_good_as_brute_force(data: st.DataObject) -> None:
    """Random layers, speeds, links, servers; all orders of devices and all partitions, simulated."""
    num_stages, num_replicas = data.draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (4, 1), (1, 3)]), label="sizes")
    num_idle = data.draw(st.integers(0, 1 if num_stages * num_replicas < 4 else 0), label="idle")
    num_devices = num_stages * num_replicas + num_idle
    names = data.draw(st.text("AB", min_size=num_devices, max_size=num_devices), label="servers")
    speeds = data.draw(
        st.lists(st.sampled_from([1.0, 0.5]), min_size=num_devices, max_size=num_devices), label="speeds"
    )
    times = data.draw(st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages + 1), label="times")
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(times) - 1, max_size=len(times) - 1), label="bytes")
    profile = a_model(times, value_bytes=sizes, gradient_bytes=data.draw(st.integers(0, 5), label="gradients"))
    setting = a_mapping_setting(profile, a_cluster(names, speeds), num_stages, num_replicas, 2 * num_replicas + 1)
    found = choose_mapping(setting, max_exact=10_000)
    assert found.is_exact
    best_s = brute_force(setting, keeps_rank_0=True)
    assert best_s / SAME <= found.step_s <= best_s * SAME
    free_s = brute_force(setting, keeps_rank_0=False)
    assert free_s / SAME <= found.free_step_s <= free_s * SAME
    assert found.lower_bound_s <= found.step_s * SAME
    searched = choose_mapping(setting, max_exact=0)
    assert not searched.is_exact
    assert searched.step_s * SAME >= best_s


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_bound_is_above_the_step_and_exchanges_keep_it_up(data: st.DataObject) -> None:
    num_stages, num_replicas = data.draw(st.sampled_from([(2, 2), (3, 2), (2, 3), (4, 1), (1, 4)]), label="sizes")
    num_devices = num_stages * num_replicas + 1
    names = data.draw(st.text("ABC", min_size=num_devices, max_size=num_devices), label="servers")
    speeds = data.draw(
        st.lists(st.sampled_from([1.0, 0.5]), min_size=num_devices, max_size=num_devices), label="speeds"
    )
    times = data.draw(st.lists(st.integers(1, 9), min_size=num_stages + 1, max_size=num_stages + 3), label="times")
    profile = a_model(times, num_bytes=data.draw(st.integers(0, 9), label="bytes"), gradient_bytes=3)
    setting = a_mapping_setting(profile, a_cluster(names, speeds), num_stages, num_replicas, 3 * num_replicas)
    prices = MappingPrices(setting)
    order = data.draw(st.permutations(range(num_devices)), label="order")
    grid = tuple(tuple(order[r * num_stages : (r + 1) * num_stages]) for r in range(num_replicas))
    shares = prices.even_shares()
    cuts = prices.cuts(grid, shares)
    bound = MappingBound(prices, grid, cuts, shares)
    assert bound.score()[1] <= simulated_s(setting, grid, cuts, shares) * SAME
    places = bound.places()
    a, b = data.draw(st.lists(st.sampled_from(places), min_size=2, max_size=2, unique=True), label="exchanged")
    bound.exchange(a, b)
    anew = MappingBound(prices, bound.grid, cuts, shares).score()
    assert bound.score() == pytest.approx(anew)
    assert anew[1] <= simulated_s(setting, bound.grid, cuts, shares) * SAME


def test_neighbouring_stages_are_put_into_one_server() -> None:
    """A,B,A,B: three of three crossings between servers; A,A,B,B: one. Rank 0 keeps the last stage."""
    setting = a_mapping_setting(a_model([10.0] * 4, num_bytes=20), a_cluster("ABAB"), 4, 1, 16)
    for max_exact in (10_000, 0):
        found = choose_mapping(setting, max_exact=max_exact)
        assert [setting.topology.devices[rank].server for (rank,) in found.mapping.stage_ranks] == ["B", "B", "A", "A"]
        assert found.mapping.stage_ranks[-1] == (0,)
        assert found.step_s == pytest.approx(simulated_s(setting, ((3, 1, 2, 0),), (1, 2, 3), (16,)))
        assert found.step_s < 0.8 * simulated_s(setting, ((3, 2, 1, 0),), (1, 2, 3), (16,))


def test_replicas_of_a_stage_share_a_server_where_gradients_are_large() -> None:
    large = a_mapping_setting(a_model([1.0] * 2, num_bytes=1, gradient_bytes=1000), a_cluster("ABAB"), 2, 2, 8)
    assert set(map(frozenset, choose_mapping(large).mapping.stage_ranks)) == {frozenset({0, 2}), frozenset({1, 3})}
    small = a_mapping_setting(a_model([1.0] * 2, num_bytes=100, gradient_bytes=1), a_cluster("ABAB"), 2, 2, 8)
    found = choose_mapping(small).mapping
    assert {frozenset(found.pipeline_ranks(index)) for index in (0, 1)} == {frozenset({0, 2}), frozenset({1, 3})}


def test_unlike_replicas_take_unlike_numbers_of_microbatches() -> None:
    """8 devices of speed 1, 4 of speed 1/2, 96 micro-batches of a second: 16 s in equal shares, 10 s in these."""
    speeds = [1.0] * 8 + [0.5] * 4
    profile = a_profile([0.25], [0.75])
    setting = a_mapping_setting(profile, a_cluster("AAAAAAAABBBB", speeds), 1, 12, 96)
    found = choose_mapping(setting)
    assert found.step_s == pytest.approx(10.0)
    by_rank = dict(zip(found.mapping.stage_ranks[0], found.num_microbatches, strict=True))
    assert sum(by_rank.values()) == 96
    assert all(by_rank[rank] <= (10 if rank < 8 else 5) for rank in range(12))
    grid = tuple((rank,) for rank in range(12))
    assert simulated_s(setting, grid, (), MappingPrices(setting).even_shares()) == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("num_microbatches", "fills", "periods", "expected"),
    [
        (6, [1.0, 1.0], [1.0, 1.0], (3, 3)),
        (6, [1.0, 2.0], [1.0, 2.0], (4, 2)),
        (2, [1.0, 50.0], [1.0, 50.0], (1, 1)),
        (5, [4.0, 1.0], [1.0, 1.0], (1, 4)),
    ],
)
def test_shares(num_microbatches: int, fills: list[float], periods: list[float], expected: tuple[int, ...]) -> None:
    assert share_microbatches(num_microbatches, fills, periods) == expected


def test_what_rank_0_costs_is_told() -> None:
    """The slow device 0 must take a stage; left out, all is twice as quick."""
    setting = a_mapping_setting(a_model([1.0, 1.0]), a_cluster("AAA", [0.25, 1.0, 1.0]), 2, 1, 32)
    for max_exact in (10_000, 0):
        found = choose_mapping(setting, max_exact=max_exact)
        assert found.mapping.stage_ranks[-1] == (0,)
        assert found.free_step_s == pytest.approx(simulated_s(setting, ((1, 2),), (1,), (32,)))
        assert found.rank_0_costs == pytest.approx(found.step_s / found.free_step_s - 1)
        assert found.rank_0_costs > 2
    alike = a_mapping_setting(a_model([1.0, 1.0]), a_cluster("AAA"), 2, 1, 32)
    assert choose_mapping(alike).rank_0_costs == 0


def test_idle_devices_are_told_and_are_the_slow_ones() -> None:
    setting = a_mapping_setting(a_model([1.0] * 6), a_cluster("AABBB", [1.0, 0.5, 1.0, 0.5, 1.0]), 3, 1, 8)
    for max_exact in (10_000, 0):
        assert choose_mapping(setting, max_exact=max_exact).idle_ranks == (1, 3)


@pytest.mark.parametrize(
    ("names", "num_stages", "num_replicas"),
    [("ABBC", 4, 1), ("ABBC", 2, 2), ("AAAAAAAABBBB", 4, 3), ("AAAAAAAABBBB", 12, 1), ("AAAAAAAABBBB", 3, 3)],
)
def test_servers_with_unlike_numbers_of_devices(names: str, num_stages: int, num_replicas: int) -> None:
    profile = a_model([1.0] * 12, num_bytes=1, gradient_bytes=2)
    setting = a_mapping_setting(profile, a_cluster(names), num_stages, num_replicas, 2 * num_replicas)
    found = choose_mapping(setting)
    assert (found.mapping.num_stages, found.mapping.num_replicas) == (num_stages, num_replicas)
    assert sorted((*found.mapping.ranks, *found.idle_ranks)) == list(range(len(names)))
    launcher = placements(setting.topology, num_stages, num_replicas)["launcher"]
    assert found.step_s <= launcher_s(setting, launcher) * SAME
    assert_is_told_rightly(setting, found)


def launcher_s(setting: MappingSetting, grid: Grid) -> float:
    prices = MappingPrices(setting)
    cuts = prices.cuts(grid, prices.even_shares())
    return simulated_s(setting, grid, cuts, prices.shares(grid, cuts))


def assert_is_told_rightly(setting: MappingSetting, found: MappingChoice) -> None:
    grid = tuple(found.mapping.pipeline_ranks(index) for index in range(setting.num_replicas))
    cuts = found.partition.cut_points
    assert found.step_s == pytest.approx(simulated_s(setting, grid, cuts, found.num_microbatches))
    assert found.free_step_s <= found.step_s * SAME
    assert found.lower_bound_s <= found.step_s * SAME


# Symmetry ------------------------------------------------------------------


def test_folding_finds_the_same_with_fewer_mappings() -> None:
    profile = a_model([1.0, 2.0, 3.0, 2.0], num_bytes=3, gradient_bytes=4)
    topology = a_cluster("AABB", [1.0, 1.0, 0.5, 0.5])
    for num_stages, num_replicas in ((4, 1), (2, 2)):
        setting = a_mapping_setting(profile, topology, num_stages, num_replicas, 8)
        folded = choose_mapping(setting, max_exact=10_000)
        unfolded = choose_mapping(setting, max_exact=10_000, fold=False)
        assert folded.step_s == pytest.approx(unfolded.step_s)
        assert folded.free_step_s == pytest.approx(unfolded.free_step_s)
        assert 3 * folded.num_scored <= unfolded.num_scored


@pytest.mark.parametrize(
    ("names", "speeds", "num_orders"),
    [
        ("AAAA", [], 1),
        ("AABB", [], 3),  # AABB, ABAB, ABBA
        ("AABB", [1.0, 1.0, 0.5, 0.5], 6),
        ("ABCD", [], 1),
        ("ABC", [1.0, 0.5, 0.25], 6),
        ("ABBC", [], 6),
    ],
)
def test_orders_without_their_mirror_images(names: str, speeds: list[float], num_orders: int) -> None:
    topology = a_cluster(names, speeds)
    assert len(list(distinct_orders(topology, len(names)))) == num_orders
    assert len(list(distinct_orders(topology, len(names), fold=False))) == math.factorial(len(names))


def test_pairs_of_joined_devices_are_alike_as_pairs() -> None:
    """0=1 and 2=3 over links of their own: 0, 1, 2, 3 and 0, 2, 1, 3 differ; turning a pair around does not."""
    devices = tuple(a_device(rank) for rank in range(4))
    up = [Link(a=f"rank {rank}", b="A", bandwidth_bytes_per_s=1.0) for rank in range(4)]
    pairs = [Link(a=f"rank {a}", b=f"rank {a + 1}", bandwidth_bytes_per_s=9.0) for a in (0, 2)]
    topology = ClusterTopology(devices=devices, links=(*up, *pairs))
    assert list(distinct_orders(topology, 4)) == [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1)]
    assert Symmetries(topology).first_of_orbits(()) == (0,)
    assert len(set(twin_classes(LinkNetwork(topology)))) == 4  # no two alone are alike


# Placements ----------------------------------------------------------------


def test_placements() -> None:
    found = placements(a_cluster("AABB"), 2, 2)
    assert found["launcher"] == ((1, 0), (3, 2))
    # Both replicas of a stage in one server.
    assert ((2, 0), (3, 1)) in found.values()
    assert len(set(found.values())) == len(found)
    for grid in found.values():
        assert sorted(rank for ranks in grid for rank in ranks) == [0, 1, 2, 3]


def test_policies_of_placement_differ_where_servers_do_not_divide() -> None:
    """Stages of two replicas on servers of 3 and 3, from the last: append fills A up, fresh begins B."""
    found = placements(a_cluster("AAABBB"), 3, 2).values()
    stages = [[sorted(stage) for stage in zip(*grid, strict=True)] for grid in found]
    assert [[4, 5], [2, 3], [0, 1]] in stages  # append
    assert [[2, 5], [3, 4], [0, 1]] in stages  # fresh
    assert [[2, 5], [1, 4], [0, 3]] in stages  # scatter


def test_rank_0_is_brought_to_its_place() -> None:
    assert with_rank_0_last(((1, 2), (0, 3))) == ((3, 0), (1, 2))
    assert with_rank_0_last(((1, 2), (4, 3))) == ((1, 0), (4, 3))


# What is told of links -----------------------------------------------------


def test_link_loads_by_hand() -> None:
    """Two servers, A: stage 1, B: stage 0; 3 micro-batches of 4 bytes there and 4 back, 1 byte a second."""
    setting = a_mapping_setting(a_model([10.0, 10.0], num_bytes=4), a_cluster("AB"), 2, 1, 3)
    found = choose_mapping(setting)
    loads = {(load.sender, load.receiver): load for load in found.link_loads()}
    assert set(loads) == {("B", "switch"), ("switch", "A"), ("A", "switch"), ("switch", "B")}
    for load in loads.values():
        assert (load.stage_bytes, load.reduction_bytes, load.num_bytes) == (12, 0, 12)
        assert load.busy_share == pytest.approx(12 / found.step_s)
        assert load.contended_share == 0
        assert load.contending_flows == ()
    assert [(flow.sender, flow.receiver) for flow in loads["B", "switch"].flows] == [(1, 0)]


def test_flows_that_contend_are_named() -> None:
    """Two replicas across the same two servers: their messages meet on the servers' links, and so do their sums."""
    profile = a_model([1.0, 1.0], num_bytes=4, gradient_bytes=6)
    setting = a_mapping_setting(profile, a_cluster("AABB"), 2, 2, 4)
    work = Objective(setting.pipelines(((2, 0), (3, 1)), (2, 2))).step_work((1,), setting.depths)
    timeline = simulate(work)
    load = next(load for load in link_loads(work, timeline) if load.sender == "B")
    assert load.stage_bytes == 2 * 2 * 4
    assert load.reduction_bytes == 0  # both replicas of a stage are in one server
    assert {(flow.sender, flow.receiver) for flow in load.contending_flows} == {(2, 0), (3, 1)}
    assert load.contended_share == pytest.approx(16 / timeline.step_s)
    across = Objective(setting.pipelines(((1, 0), (3, 2)), (2, 2))).step_work((1,), setting.depths)
    load = next(load for load in link_loads(across, simulate(across)) if load.sender == "B")
    assert (load.stage_bytes, load.reduction_bytes) == (0, 2 * 6)
    assert len(load.contending_flows) == 2


# What is refused -----------------------------------------------------------


def test_too_few_devices_layers_or_microbatches_are_refused() -> None:
    profile, topology = a_model([1.0] * 3), a_cluster("AABB")
    with pytest.raises(ConfigurationError, match=r"3 stages x 2 replicas need 6 devices.*has 4.*num_stages"):
        a_mapping_setting(profile, topology, 3, 2, 8)
    with pytest.raises(ConfigurationError, match=r"1 micro-batches for 2 replicas.*num_microbatches"):
        a_mapping_setting(profile, topology, 2, 2, 1)
    with pytest.raises(ConfigurationError, match=r"4 stages for 3 layers.*num_stages"):
        choose_mapping(a_mapping_setting(profile, topology, 4, 1, 8))


@pytest.mark.parametrize("max_exact", [10_000, 0])
def test_memory_is_a_limit(max_exact: int) -> None:
    """Only device 2 has room for more than one layer."""
    profile = a_model([1.0] * 4, gradient_bytes=1000)
    devices = [a_device(rank, memory_bytes=20_000 if rank == 2 else 4_500) for rank in range(3)]
    topology = ClusterTopology(devices=tuple(devices))
    found = choose_mapping(a_mapping_setting(profile, topology, 3, 1, 4), max_exact=max_exact)
    for stage_index, (rank,) in enumerate(found.mapping.stage_ranks):
        assert len(found.partition.stage_layers(stage_index)) == (2 if rank == 2 else 1)
    small = ClusterTopology(devices=tuple(a_device(rank, memory_bytes=4_500) for rank in range(3)))
    with pytest.raises(ConfigurationError, match="no partition was found that fits the devices' memory"):
        choose_mapping(a_mapping_setting(profile, small, 3, 1, 4), max_exact=max_exact)


# The type ------------------------------------------------------------------


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


def test_a_fast_device_is_no_mirror_image_of_a_slow_one() -> None:
    topology = a_cluster("AAA", [1.0, 0.5, 1.0])
    assert list(distinct_orders(topology, 2, first=0)) == [(0, 1), (0, 2)]


def test_devices_alike_in_name_but_not_in_speed_are_no_twins() -> None:
    devices = [a_device(0), a_device(1, relative_speed=0.5), a_device(2)]
    topology = ClusterTopology(devices=tuple(devices))
    classes = twin_classes(LinkNetwork(topology))
    assert classes[0] == classes[2] != classes[1]
