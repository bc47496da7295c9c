"""Objectives of public planners, against values computed by hand."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from benchmarks.peers import dapple, pipedream, piper
from benchmarks.peers.dapple import DapplePlanner, PivotStage, latency_s, pivot
from benchmarks.peers.even import by_parameters, min_max, uniform
from benchmarks.peers.known import Known, known
from benchmarks.peers.scored import counts_text, geometric_mean, score
from lightning_autopipe.core import ClusterTopology, Link
from lightning_autopipe.planner import CostModel
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.schedules import one_f_one_b
from tests.planner.mappings import a_model
from tests.planner.steps import a_device, a_step


def a_known(
    forward_s: list[float], backward_s: list[float], params: list[float], crossing: list[float], **changes: float
) -> Known:
    def sums(values: list[float]) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    return Known(
        forward_s=sums(forward_s),
        backward_s=sums(backward_s),
        param_bytes=sums(params),
        kept_bytes=sums([7.0] * len(forward_s)),
        crossing_bytes=np.array([0.0, *crossing, 0.0]),
        **({"bandwidth_bytes_per_s": 5.0, "memory_bytes": math.inf} | changes),
    )


def two_servers(num_devices: int = 4) -> LinkNetwork:
    """Devices of two servers, 10 bytes a second inside each and 2 between them."""
    devices = tuple(a_device(rank, "AB"[2 * rank // num_devices]) for rank in range(num_devices))
    inside = [Link(a=f"rank {d.global_rank}", b=d.server, bandwidth_bytes_per_s=10.0) for d in devices]
    return LinkNetwork(ClusterTopology(devices=devices, links=(*inside, Link(a="A", b="B", bandwidth_bytes_per_s=2.0))))


def test_what_peers_know_is_one_device_and_the_slowest_way() -> None:
    devices = tuple(
        a_device(rank, "AB"[rank], relative_speed=(1.0, 0.5)[rank], memory_bytes=9 + rank) for rank in (0, 1)
    )
    network = LinkNetwork(ClusterTopology(devices=devices, links=(Link(a="A", b="B", bandwidth_bytes_per_s=3.0),)))
    found = known(CostModel(a_model([3.0, 6.0], num_bytes=4, gradient_bytes=8)), network)
    assert found.forward_s.tolist() == [0, 4, 12]  # at the mean speed of 0.75
    assert found.work_s.tolist() == [0, 12, 36]
    assert (found.param_bytes.tolist(), found.crossing_bytes.tolist()) == ([0, 8, 16], [0, 4, 0])
    assert (found.bandwidth_bytes_per_s, found.memory_bytes, found.num_layers) == (3.0, 9, 2)


# Slowest stage ---------------------------------------------------------------


def test_pipedream_shares_a_stage_and_its_reduction_between_replicas() -> None:
    """C = 6, W = 10, B = 5: (6 + 4 (m - 1) 10 / (5 m)) / m."""
    layers = a_known([2.0, 1.0], [2.0, 1.0], [4.0, 6.0], [1.0])
    assert pipedream.stage_s(layers, 1)[0, 2] == 6
    assert pipedream.stage_s(layers, 2)[0, 2] == (6 + 4) / 2
    assert pipedream.stage_s(layers, 4)[0, 2] == (6 + 4 * 3 * 10 / 20) / 4


def test_pipedream_gives_the_heavy_stage_more_devices() -> None:
    layers = a_known([8.0, 3.0], [0.0, 0.0], [0.0, 0.0], [1.0])
    plan = pipedream.plan(layers, num_devices=4)
    assert (plan.cuts, plan.counts, plan.objective) == ((), (4,), 2.75)
    dear = a_known([9.0, 3.0], [0.0, 0.0], [0.0, 100.0], [1.0])
    plan = pipedream.plan(dear, num_devices=4)
    assert (plan.cuts, plan.counts, plan.objective) == ((1,), (3, 1), 3.0)
    assert pipedream.plan(dear, num_devices=4, num_replicas=2).counts == (2, 2)
    # A crossing of 2 x 20 bytes at 5 a second is slower than both stages on one.
    slow = a_known([9.0, 3.0], [0.0, 0.0], [0.0, 1.0], [40.0])
    assert pipedream.plan(slow, num_devices=4).cuts == ()


def test_piper_counts_crossings_on_both_sides_and_its_memory() -> None:
    """p = 6, 3 bytes come in and 2 go out, w = 10, B = 5, d = 2, N = 4: (6 + 2 x 5 / 5) / 2 + 4 x 10 / (2 x 4 x 5)."""
    layers = a_known([1.0, 4.0, 1.0], [1.0, 2.0, 1.0], [1.0, 10.0, 1.0], [3.0, 2.0], memory_bytes=61.0)
    assert piper.stage_s(layers, 2, 5, 4)[1, 2] == 5.0
    # ceil(5 / 2) = 3 micro-batches of 7 bytes, and four times 10 of parameters.
    tight = a_known([1.0, 4.0, 1.0], [1.0, 2.0, 1.0], [1.0, 10.0, 1.0], [3.0, 2.0], memory_bytes=60.0)
    assert piper.stage_s(tight, 2, 5, 4)[1, 2] == math.inf
    assert piper.stage_s(tight, 2, 4, 4)[1, 2] == 5.0
    none = a_known([1.0] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 2, memory_bytes=10.0)
    assert piper.plan(none, num_devices=3, num_microbatches=4) is None


def test_the_slowest_stage_is_as_quick_as_in_the_best_of_all_plans() -> None:
    times, params, crossing = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], [2.0, 6.0, 5.0, 3.0, 5.0, 8.0], [9.0, 1.0, 8.0, 2.0, 3.0]
    layers = a_known(times, times, params, crossing)
    best = math.inf
    for num_stages in range(1, 5):
        for cuts in combinations(range(1, 6), num_stages - 1):
            for ends in combinations(range(1, 5), num_stages):  # up to 4 devices
                counts = [b - a for a, b in pairwise((0, *ends))]
                stages = zip(pairwise((0, *cuts, 6)), counts, strict=True)
                seconds = [float(pipedream.stage_s(layers, count)[a, b]) for (a, b), count in stages]
                best = min(best, max(*seconds, *(2 * crossing[cut - 1] / 5 for cut in cuts), 0.0))
    assert pipedream.plan(layers, num_devices=4).objective == pytest.approx(best)


# DAPPLE ----------------------------------------------------------------------


def test_dapple_latency_of_two_stages() -> None:
    """F = 2, 1 and B = 4, 2, M = 4: stage 0 is the pivot: 2 + 3 x 6 + max(AR_0 + 4, AR_1 - (4 + 2))."""
    stages = [PivotStage(forward_s=2, backward_s=4), PivotStage(forward_s=1, backward_s=2)]
    assert pivot(stages, 4) == 0
    assert latency_s(stages, 4) == 2 + 18 + 4
    reduced = [
        PivotStage(forward_s=2, backward_s=4, allreduce_s=1),
        PivotStage(forward_s=1, backward_s=2, allreduce_s=30),
    ]
    assert latency_s(reduced, 4) == 2 + 18 + 24


def test_dapple_pivot_is_late_unless_an_earlier_stage_outweighs_what_lies_between() -> None:
    """The last stage is the pivot: F up to it 6, 3 x 9, and B from each stage to it 13 at the most."""
    stages = [PivotStage(forward_s=f, backward_s=b) for f, b in ((3, 5), (0, 2), (3, 6))]
    assert pivot(stages, 4) == 2
    assert latency_s(stages, 4) == 6 + 27 + 13
    # 3 x 10 is more than 3 x 9, but not than that and the 4 of the stage between.
    waits = [PivotStage(forward_s=f, backward_s=b) for f, b in ((4, 6), (2, 2), (3, 6))]
    assert pivot(waits, 4) == 2
    assert pivot(waits, 8) == 0  # 7 x 10 is more than 7 x 9 + 4
    rising = [PivotStage(forward_s=f, backward_s=6) for f in (4.1, 4, 3)]
    assert pivot(rising, 4) == 0  # each one outweighs the next, and nothing lies between


def test_dapple_prices_crossings_and_reductions_by_servers() -> None:
    layers = a_known([4.0, 4.0], [8.0, 8.0], [30.0, 10.0], [20.0])
    planner = DapplePlanner(layers, two_servers(), 3)
    # Stages of two inside a server: F 2, B 4; the crossing 20 / 2; sums of 2 x 1/2 x 30 and 10 bytes at 10 a second.
    crossing = PivotStage(forward_s=10, backward_s=10)
    expected = [
        PivotStage(forward_s=2, backward_s=4, allreduce_s=3),
        crossing,
        PivotStage(forward_s=2, backward_s=4, allreduce_s=1),
    ]
    assert planner.objective((1,), ((0, 1), (2, 3))) == pytest.approx(latency_s(expected, 3))
    # Each stage over both servers: sums at 2 bytes a second.
    across = [
        PivotStage(forward_s=2, backward_s=4, allreduce_s=15),
        crossing,
        PivotStage(forward_s=2, backward_s=4, allreduce_s=5),
    ]
    assert planner.objective((1,), ((0, 2), (1, 3))) == pytest.approx(latency_s(across, 3))


def test_dapple_policies() -> None:
    layers = a_known([1.0] * 4, [1.0] * 4, [1.0] * 4, [1.0] * 3)
    planner = DapplePlanner(layers, two_servers(8), 4)
    first, rest = planner._taken((0, 0), "fresh", 3)
    assert (first, rest) == ((3, 0), (0, 1, 2))
    assert planner._taken(first, "fresh", 3)[1] == (4, 5, 6)
    assert planner._taken(first, "append", 3)[1] == (3, 4, 5)
    assert planner._taken(first, "scatter", 3)[1] == (3, 4, 5)
    assert planner._taken((0, 0), "scatter", 4)[1] == (0, 4, 1, 5)


def test_dapple_finds_the_best_cuts_and_counts_of_a_small_model() -> None:
    layers = a_known([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 1.0, 400.0], [30.0, 1.0])
    planner = DapplePlanner(layers, two_servers(), 4)
    plan = planner.plan()
    servers = [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2, 3)), ((0,), (1,), (2, 3))]
    best = min(planner.objective(cuts, ranks) for ranks in servers for cuts in combinations((1, 2), len(ranks) - 1))
    assert plan.objective <= best
    assert plan.objective == pytest.approx(planner.objective(plan.cuts, plan.stage_ranks))
    assert plan.stage_ranks[-1] == (3,)  # the large layer is not replicated
    equal = list(planner.equal_plans(2, 2))
    assert min(one.objective for one in equal) == pytest.approx(
        min(planner.objective((cut,), ((0, 1), (2, 3))) for cut in (1, 2))
    )


def test_dapple_moves_cuts_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = a_known(
        [1.0, 3.0, 1.0, 2.0, 5.0, 1.0, 2.0, 3.0], [2.0] * 8, [1.0] * 8, [3.0, 9.0, 1.0, 4.0, 2.0, 8.0, 5.0]
    )
    planner = DapplePlanner(layers, two_servers(), 8)
    exact = [plan.objective for plan in planner.equal_plans(4, 1)]
    monkeypatch.setattr(dapple, "MAX_EXACT", 0)
    moved = [plan.objective for plan in planner.equal_plans(4, 1)]
    assert all(found >= best * (1 - 1e-12) for found, best in zip(moved, exact, strict=True))
    assert min(moved) == pytest.approx(min(exact), rel=0.02)


# Even ones, and scores ----------------------------------------------------------


def test_even_planners() -> None:
    layers = a_known([4.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 9.0], [1.0] * 3)
    assert (uniform(layers, 2), by_parameters(layers, 2), min_max(layers, 2)) == ((2,), (3,), (1,))


def test_scores_are_the_simulators_with_the_balance_of_devices() -> None:
    step = a_step(one_f_one_b(2, 3), [(1.0, 2.0), (3.0, 3.0)])
    topology = ClusterTopology(devices=(a_device(0), a_device(1)))
    scored = score("mine", step, topology, plan="2 x 1", search_s=0.5)
    assert scored.fits
    assert scored.step_s == 1 + 3 * 6 + 2
    assert (scored.max_over_mean, scored.spread) == (18 / 13.5, 9 / 13.5)
    full = ClusterTopology(devices=(a_device(0, memory_bytes=7), a_device(1)))
    heavy = a_step(one_f_one_b(2, 3), [(1.0, 2.0), (3.0, 3.0)], stash_bytes=8)
    assert not score("mine", heavy, full, plan="2 x 1", search_s=0.5).fits


def test_texts_and_means() -> None:
    assert (counts_text((2, 2, 2)), counts_text((15, 1))) == ("3 x 2", "15-1")
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))
