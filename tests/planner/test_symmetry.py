"""Alike devices are folded together, and only those."""

from __future__ import annotations

import math

import pytest

from lightning_autopipe.core import ClusterTopology, Link
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import choose_mapping, every_grid
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_search import MappingSearch
from lightning_autopipe.planner.symmetry import Symmetries, distinct_orders, twin_classes
from tests.planner.mappings import a_cluster, a_mapping_setting, a_model
from tests.planner.steps import a_device


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


def test_a_fast_device_is_no_mirror_image_of_a_slow_one() -> None:
    topology = a_cluster("AAA", [1.0, 0.5, 1.0])
    assert list(distinct_orders(topology, 2, first=0)) == [(0, 1), (0, 2)]


def test_devices_alike_in_name_but_not_in_speed_are_no_twins() -> None:
    devices = [a_device(0), a_device(1, relative_speed=0.5), a_device(2)]
    topology = ClusterTopology(devices=tuple(devices))
    classes = twin_classes(LinkNetwork(topology))
    assert classes[0] == classes[2] != classes[1]


@pytest.mark.parametrize(("fold", "num_grids"), [(True, 12), (False, 24)])
def test_rings_that_begin_elsewhere_are_one_grid(fold: bool, num_grids: int) -> None:
    """Four unlike devices, 2 stages x 2 replicas: 24 orders, of which each has the same ring as another one."""
    topology = a_cluster("AAAA", [1.0, 0.5, 0.25, 0.125])
    grids = set(every_grid(topology, 2, 2, fold=fold, first=None))
    assert len(grids) == num_grids
    if fold:
        assert all((second, first) not in grids for first, second in grids)


def a_search(names: str, *, fold: bool) -> MappingSearch:
    """A stage for each device; neighbouring stages in unlike servers pay dearly."""
    setting = a_mapping_setting(a_model([10.0] * len(names), num_bytes=20), a_cluster(names), len(names), 1, 16)
    return MappingSearch(prices=MappingPrices(setting), fold=fold)


def test_exchanges_of_twins_are_left_out_and_nothing_is_lost() -> None:
    """From two stages in the wrong server to the best placement."""
    found = {}
    for fold in (True, False):
        search = a_search("AAAAABBBBB", fold=fold)
        start = search.evaluated(((9, 8, 3, 6, 5, 4, 7, 2, 1, 0),))
        improved = search.improved(start, effort=10**6)
        append = search.evaluated(((9, 8, 7, 6, 5, 4, 3, 2, 1, 0),))
        assert append.score[1] < 0.9 * start.score[1]
        assert improved.score == pytest.approx(append.score)
        found[fold] = search.num_scored
    assert found[True] < 0.9 * found[False]


def test_where_all_devices_are_twins_nothing_is_exchanged() -> None:
    search = a_search("AAAAAAAAAA", fold=True)
    start = search.evaluated((tuple(range(9, -1, -1)),))
    search.improved(start, effort=10**6)
    assert search.num_scored == 2  # the start, and stages the other way around
