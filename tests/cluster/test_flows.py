from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopipe.cluster import Flow, FlowTime, fit_flow, measurement_rounds
from lightning_autopipe.core import ConfigurationError


def ways(servers: str, name: str) -> list[list[tuple[int, int]]]:
    return [
        [(flow.sender, flow.receiver) for flow in each.flows]
        for each in measurement_rounds(tuple(servers))
        if each.name == name
    ]


def test_pairs_across_servers_come_first_then_pairs_inside_them() -> None:
    assert ways("aabb", "alone") == [[(0, 2)], [(2, 0)], [(0, 1)], [(1, 0)], [(2, 3)], [(3, 2)]]
    assert ways("aabb", "both directions") == [[(0, 2), (2, 0)], [(0, 1), (1, 0)], [(2, 3), (3, 2)]]


def test_several_flows_at_once() -> None:
    assert ways("aaaab", "neighbours at once") == [[(0, 1), (2, 3)]]
    assert ways("aaaab", "halves at once") == [[(0, 2), (1, 3)]]
    assert ways("aabbb", "servers at once") == [[(0, 2), (1, 3)], [(2, 0), (3, 1)]]
    assert ways("aab", "servers at once") == []
    assert ways("abbc", "ring of servers") == [[(0, 2), (1, 3), (3, 0)]]
    assert measurement_rounds(("a",)) == ()


@given(servers=st.lists(st.sampled_from("abcd"), min_size=1, max_size=14))
def test_rounds_are_symmetric_and_no_rank_sends_or_receives_twice_at_once(servers: list[str]) -> None:
    rounds = measurement_rounds(servers)
    alone = [each.flows[0] for each in rounds if each.name == "alone"]
    assert {Flow(sender=flow.receiver, receiver=flow.sender) for flow in alone} == set(alone)
    assert len(set(alone)) == len(alone)
    both = [each.flows for each in rounds if each.name == "both directions"]
    assert sorted(map(str, sum(both, ()))) == sorted(map(str, alone))
    for each in rounds:
        for end in ("sender", "receiver"):
            assert max(Counter(getattr(flow, end) for flow in each.flows).values()) == 1, each
        assert all(flow.sender != flow.receiver for flow in each.flows)
    reached = {rank for flow in alone for rank in (flow.sender, flow.receiver)}
    first_ranks = {servers.index(server) for server in servers}
    lonely = {rank for rank, server in enumerate(servers) if servers.count(server) == 1 and len(first_ranks) == 1}
    assert reached == set(range(len(servers))) - lonely


def test_a_line_is_found_exactly_and_outliers_do_not_move_it() -> None:
    times = {size: [1e-4 + size / 1e9, 1e-4 + size / 1e9, 5.0] for size in (1 << 10, 1 << 16, 1 << 20)}
    fitted = fit_flow(times)
    assert fitted.latency_s == pytest.approx(1e-4, rel=1e-9)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-9)
    assert fit_flow(times, round_trip_s=3e-4).latency_s == 1.5e-4


def test_an_error_of_the_largest_message_leaves_the_latency() -> None:
    fitted = fit_flow({1000: [1.01e-4], 1_000_000: [1.1e-3], 100_000_000: [1.05 * 0.1001]})
    assert fitted.latency_s == pytest.approx(1e-4, rel=0.01)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_noise_gives_no_negative_figures() -> None:
    assert fit_flow({1000: [2.0], 2000: [1.0]}) == FlowTime(latency_s=0.0, bandwidth_bytes_per_s=2000.0)
    assert fit_flow({1000: [0.1], 2000: [1.0]}).latency_s == 0.0
    assert fit_flow({1000: [1.0]}) == FlowTime(latency_s=0.0, bandwidth_bytes_per_s=1000.0)
    with pytest.raises(ConfigurationError, match="at least one size, with times > 0"):
        fit_flow({})
