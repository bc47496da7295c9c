"""Devices for stages: never above brute force on small clusters, hand cases, and what is reported."""

from __future__ import annotations

import math
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.cluster import find_cluster_file, load_topology
from lightning_autopipe.core import ClusterTopology, ConfigurationError
from lightning_autopipe.planner import CostModel
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.mapping_bound import MappingBound
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.placements import Grid, placements, with_rank_0_last
from lightning_autopipe.planner.shares import share_microbatches
from lightning_autopipe.profile_files import load_profile
from tests.planner.mappings import SAME, a_cluster, a_mapping_setting, a_model, simulated_s
from tests.planner.steps import a_device, a_profile

PROFILES = Path(__file__).parents[2] / "benchmarks" / "profiles"


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
    searched = choose_mapping(setting, max_exact=0)  # may be better: its shares may be those for other cuts
    assert not searched.is_exact
    assert searched.lower_bound_s <= searched.step_s * SAME


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


@pytest.mark.parametrize(
    ("speeds", "num_stages", "num_replicas", "expected"),
    [
        ([1.0] * 4, 4, 1, (8 - 1 - 3 / 3 + 4) / 4),
        ([1.0] * 4, 2, 2, (8 - 2 * (1 + 1 / 3) + 4) / 4),
        ([1.0, 1.0, 0.5, 0.5], 4, 1, (8 - 1 - 3 / 3 + 4) / 3),
        ([1.0, 1.0, 1.0, 0.05], 4, 1, (8 - 1 - 3 / 3 + 3) / 3),  # the slow one does not help
        ([1.0] * 6, 4, 1, (8 - 1 - 3 / 3 + 4) / 4),
    ],
)
def test_the_lower_bound_by_hand(speeds: list[float], num_stages: int, num_replicas: int, expected: float) -> None:
    """In micro-batches of 12 seconds, on devices of speed 1; each stage takes 1 forward and 2 backward."""
    topology = a_cluster("A" * len(speeds), speeds)
    setting = a_mapping_setting(a_model([1.0] * 4), topology, num_stages, num_replicas, 8)
    bound_s = MappingPrices(setting).lower_bound_s()
    assert bound_s == pytest.approx(12 * expected)
    assert bound_s <= choose_mapping(setting).step_s * SAME


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


@pytest.mark.parametrize(
    ("name", "num_stages", "cuts"),
    [("dapple-vgg-19-pbs-32", 2, (8, 10, 12, 14)), ("dapple-amoeba-18-pbs-8", 3, (11, 12, 18, 19))],
)
def test_no_placement_with_other_cuts_is_better(name: str, num_stages: int, cuts: tuple[int, ...]) -> None:
    """Profiles with large gradients and values, where waits for links decide, on unlike servers of 8 and 4 devices."""
    network = LinkNetwork(load_topology(find_cluster_file("rtx3090_v100")))
    num_replicas = 12 // num_stages
    setting = MappingSetting(
        cost=CostModel(load_profile(PROFILES / f"{name}.json")),
        network=network,
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=48,
        equal_shares=True,
    )
    best_s = math.inf
    for placement in placements(network.topology, num_stages, num_replicas).values():
        objective = Objective(setting.pipelines(with_rank_0_last(placement), (48 // num_replicas,) * num_replicas))
        for chosen in combinations(cuts, num_stages - 1):
            if objective.step_s(chosen, setting.depths) < best_s:
                best_s = min(best_s, objective.predicted_s(chosen, setting.depths))
    assert choose_mapping(setting).step_s <= best_s * SAME


@pytest.mark.parametrize("names", ["AABCCCC", "AAAABBB"])
def test_seven_unlike_devices_are_as_good_as_brute_force(names: str) -> None:
    """All 720 orders with rank 0 on the last stage, simulated; speeds, layers and values are unlike."""
    speeds = [0.5, 1.0, 0.25, 0.7, 0.5, 1.0, 0.9]
    profile = a_model([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 1.0], value_bytes=[3, 0, 9, 1, 5, 2])
    setting = a_mapping_setting(profile, a_cluster(names, speeds, bandwidth=2.0), 7, 1, 2)
    found = choose_mapping(setting, max_exact=720)
    assert found.is_exact
    cuts = tuple(range(1, 7))
    best_s = min(simulated_s(setting, ((*order, 0),), cuts, (2,)) for order in permutations(range(1, 7)))
    assert best_s / SAME <= found.step_s <= best_s * SAME
    assert choose_mapping(setting, max_exact=0).step_s <= 1.05 * best_s
