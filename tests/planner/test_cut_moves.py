"""Where searches for cuts begin, and which way they go, where links are slow and little crosses some cuts."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest

from lightning_autopipe.cluster import find_cluster_file, load_topology
from lightning_autopipe.core import CrossingValue, Link
from lightning_autopipe.planner.cheap_cuts import cheap_cuts, cheapest_cuts, lopsided_cuts, quickest_cuts
from lightning_autopipe.planner.cut_moves import CheaperCuts, shifted, slid
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.profile_files import load_profile
from lightning_autopipe.schedules import default_depths
from tests.planner.steps import a_device, a_profile, a_setting, servers

PROFILES = Path(__file__).parents[2] / "benchmarks" / "profiles"
#           before layer  0  1  2  3  4  5  6  7  8
ENTRY = [0.0, 9.0, 1.0, 9.0, 9.0, 9.0, 2.0, 9.0, 0.0]
EVEN = [float(index) for index in range(9)]


def test_shifted_moves_runs_of_cuts_by_a_layer() -> None:
    assert list(shifted((1, 3), 4)) == [(2, 3), (1, 2)]
    assert set(shifted((2, 4), 6)) == {(3, 4), (1, 4), (2, 5), (2, 3), (3, 5), (1, 3)}
    assert list(shifted((), 4)) == []


def test_jumps_go_to_the_next_cheaper_cut_on_either_side() -> None:
    moves = CheaperCuts([[0.0] * 9, ENTRY, ENTRY])
    assert set(moves.jumped((4, 7))) == {(2, 7), (6, 7)}  # 7 would jump to 6, which is next to it
    assert set(moves.jumped((2, 4))) == {(2, 6)}  # 4 cannot jump over 2
    assert list(moves.jumped((2, 6))) == []


def test_jumps_also_go_to_dearer_cuts_that_are_cheap_among_their_neighbours() -> None:
    entry = [0.0, 1.0, 9.0, 9.0, 5.0, 9.0, 9.0, 0.0]
    assert set(CheaperCuts([[0.0] * 8, entry]).jumped((1,))) == {(4,)}
    assert set(CheaperCuts([[0.0] * 8, [3.0] * 8]).jumped((4,))) == set()


def test_cuts_slide_as_far_as_neither_stage_adds_too_much() -> None:
    even = [float(index) for index in range(13)]
    free = [[0.0] * 13] * 3
    assert set(slid((4, 8), [even] * 3, free, 100.0)) == {
        *((cut, 8) for cut in (1, 2, 6, 7)),
        *((4, cut) for cut in (5, 6, 10, 11)),
    }
    assert set(slid((4, 8), [even] * 3, free, 6.0)) == {(2, 8), (6, 8), (4, 6), (4, 10)}
    dear = [[0.0] * 13, [2.0] * 13, [0.0] * 13]
    assert set(slid((4, 8), [even] * 3, dear, 6.0)) == {(2, 8), (6, 8), (4, 6)}


def test_cheap_cuts_even_out_stages_at_cuts_below_each_price() -> None:
    entries = [[0.0] * 9, ENTRY, ENTRY]
    assert list(cheap_cuts([EVEN] * 3, entries)) == [(2, 6)]
    # Only the second boundary is slow.
    assert list(cheap_cuts([EVEN] * 3, [[0.0] * 9, [0.0] * 9, ENTRY])) == [(1, 2), (3, 6)]


def test_lopsided_cuts_leave_one_stage_with_almost_all() -> None:
    assert list(lopsided_cuts(3, 9)) == [(7, 8), (1, 8), (1, 2)]
    assert list(lopsided_cuts(1, 9)) == [()]


@pytest.mark.parametrize("first_bytes", [1, 60])
def test_a_search_goes_far_for_a_cut_at_which_little_crosses(first_bytes: int) -> None:
    """24 layers in two servers: 100 bytes cross each cut but the second and (with other bytes) the fourth."""
    sizes = [100] * 23
    sizes[1], sizes[3] = first_bytes, 30
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=size, gradient_bytes=size)
        for index, size in enumerate(sizes)
    )
    network = servers("AABB", Link(a="A", b="B", bandwidth_bytes_per_s=2.0, latency_s=0.1))
    devices = tuple(a_device(rank, server) for rank, server in enumerate("AABB"))
    profile = a_profile([1.0] * 24, [2.0] * 24, values=values)
    setting = a_setting(profile, 4, 8, devices=(devices,), network=network)
    objective, depths = Objective(setting), default_depths(4)
    best = min(objective.step_s(cuts, depths) for cuts in combinations(range(1, 24), 3))
    found = choose_partition(setting, max_exact=0)
    assert found.step_s == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_quickest_cuts_are_those_of_all_that_keep_the_limits(seed: int) -> None:
    chance = random.Random(seed)
    num_layers, num_stages = 9, 4
    times = [[chance.random() for _ in range(num_layers)] for _ in range(num_stages)]
    prefixes = [list(accumulate(of_stage, initial=0.0)) for of_stage in times]
    weights = [[8 * seconds for seconds in prefix] for prefix in prefixes]
    entries = [[0.0] * 10, *([chance.random() for _ in range(10)] for _ in range(3))]
    rooms = [chance.randint(2, 6) for _ in range(num_stages)]

    def fits(stage_index: int, start: int, stop: int) -> bool:
        return stop - start <= rooms[stage_index]

    def seconds(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, num_layers)
        stages = enumerate(pairwise(edges))
        return sum(prefixes[s][b] - prefixes[s][a] + entries[s][a] for s, (a, b) in stages)

    def keeps(cuts: tuple[int, ...], limit: float) -> bool:
        stages = enumerate(pairwise((0, *cuts, num_layers)))
        return all(fits(s, a, b) and (b - a == 1 or weights[s][b] - weights[s][a] <= limit) for s, (a, b) in stages)

    for limit in (8.0, 14.0, 100.0):
        kept = [cuts for cuts in combinations(range(1, num_layers), 3) if keeps(cuts, limit)]
        found = quickest_cuts(weights, entries, prefixes, limit, fits)
        assert (found is None) == (not kept)
        if found is not None:
            assert found in kept
            assert seconds(found) == pytest.approx(min(map(seconds, kept)))


def test_cheapest_cuts_begin_with_even_stages_beside_a_heavy_layer() -> None:
    prefix = [0.0, 50.0, *(50.0 + index for index in range(1, 13))]
    entry = [0.0, *([5.0, 1.0] * 6), 0.0]
    found = cheapest_cuts([prefix] * 4, [[0.0] * 14, entry, entry, entry], [prefix] * 4, 50.0)
    assert found[0] == (1, 5, 9)  # no stage is heavier than four layers, but the one with the heavy layer
    assert sum(entry[cut] for cut in found[-1]) < sum(entry[cut] for cut in found[0])


def test_short_memory_far_from_all_other_starts() -> None:
    """A heavy first layer decides the step; the next layers have large activations, and devices little memory."""
    profile = load_profile(PROFILES / "pipedream-resnet18.json")
    network = LinkNetwork(load_topology(find_cluster_file("no_peer_access_4")))
    devices = network.topology.devices[::-1]
    setting = a_setting(profile, 4, 16, devices=(devices,), network=network)
    found = choose_partition(setting, max_exact=0)
    assert found.step_s <= 7.943558460800003 * (1 + 1e-9)  # the least of all 54,740 partitions
