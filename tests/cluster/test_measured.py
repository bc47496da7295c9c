"""Measured figures become links; the times come from a cluster that is known, so that it must come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lightning_autopipe.cluster import (
    Flow,
    FlowTime,
    MeasuredRound,
    find_cluster_file,
    load_topology,
    measured_topology,
    measurement_rounds,
    relative_speeds,
    shared_flows,
    with_speeds,
)
from lightning_autopipe.core import ClusterTopology, ConfigurationError, Device, Link
from lightning_autopipe.planner.links import LinkNetwork, max_min_rates


def ideal_measurement(cluster: ClusterTopology) -> tuple[MeasuredRound, ...]:
    """What flows get on a cluster where links are shared max-min fairly."""
    network = LinkNetwork(cluster)
    bandwidths = [channel.bandwidth_bytes_per_s for channel in network.channels]
    measured = []
    for each in measurement_rounds([device.server for device in cluster.devices]):
        routes = [network.route(flow.sender, flow.receiver) for flow in each.flows]
        rates = max_min_rates([route.channels for route in routes], bandwidths)
        times = tuple(
            FlowTime(latency_s=route.latency_s, bandwidth_bytes_per_s=rate)
            for route, rate in zip(routes, rates, strict=True)
        )
        measured.append(MeasuredRound(round=each, times=times))
    return tuple(measured)


def without_links(cluster: ClusterTopology) -> ClusterTopology:
    return ClusterTopology(devices=cluster.devices)


def agree(a: ClusterTopology, b: ClusterTopology, pairs: Sequence[tuple[int, int]]) -> None:
    for sender, receiver in pairs:
        expected, found = (LinkNetwork(c).route(sender, receiver).bandwidth_bytes_per_s for c in (a, b))
        assert found == pytest.approx(expected), (sender, receiver)


def test_two_groups_behind_two_sockets_come_back() -> None:
    cluster = load_topology(find_cluster_file("rtx4090_8"))
    measured = measured_topology(without_links(cluster), ideal_measurement(cluster))
    agree(cluster, measured, [(0, 1), (0, 3), (4, 7), (0, 4), (3, 7)])
    assert {link.a for link in measured.links if link.b == "ada"} == {"ada/group 0", "ada/group 1"}
    assert all(link.duplex == "full" and link.kind == "measured" for link in measured.links)


def test_what_flows_share_across_sockets_is_found() -> None:
    cluster = load_topology(find_cluster_file("rtx4090_8"))
    shared = shared_flows(ideal_measurement(cluster))
    assert {(each.round_name, str(each.flow)) for each in shared} == {
        ("halves at once", f"{rank}->{rank + 4}") for rank in range(4)
    }
    assert all(each.share == pytest.approx(0.25) for each in shared)


def test_a_network_gets_what_all_flows_of_a_server_get_together() -> None:
    cluster = load_topology(find_cluster_file("slow_network"))
    measured = measured_topology(without_links(cluster), ideal_measurement(cluster))
    agree(cluster, measured, [(0, 1), (2, 3), (0, 2), (3, 1)])
    assert LinkNetwork(measured).route(0, 3).latency_s == pytest.approx(2 * 50e-6 + 2 * 200e-6)
    assert LinkNetwork(measured).route(0, 1).latency_s == pytest.approx(2 * 50e-6)
    assert [link.bandwidth_bytes_per_s for link in measured.links if link.b == "network"] == [25e6, 25e6]
    wide = ClusterTopology(
        devices=cluster.devices,
        links=(
            *(Link(a=f"rank {rank}", b=f"node-{rank // 2}", bandwidth_bytes_per_s=1e9) for rank in range(4)),
            *(Link(a=f"node-{index}", b="network", bandwidth_bytes_per_s=1.8e9) for index in range(2)),
        ),
    )
    measured = measured_topology(without_links(wide), ideal_measurement(wide))
    assert [link.bandwidth_bytes_per_s for link in measured.links if link.b == "network"] == [1.8e9, 1.8e9]


def test_flows_that_take_turns_on_a_network_got_no_more_than_it_has() -> None:
    cluster = load_topology(find_cluster_file("slow_network"))
    in_turns = tuple(
        MeasuredRound(
            round=each.round,
            times=tuple(FlowTime(latency_s=0.0, bandwidth_bytes_per_s=25e6 / turn) for turn in (1, 2)),
        )
        if each.round.name == "servers at once"
        else each
        for each in ideal_measurement(cluster)
    )
    measured = measured_topology(without_links(cluster), in_turns)
    assert [link.bandwidth_bytes_per_s for link in measured.links if link.b == "network"] == [25e6, 25e6]
    # Each is first about as often as the other: medians of both are too good.
    mixed = tuple(
        replace(
            each,
            times=tuple(FlowTime(latency_s=0.0, bandwidth_bytes_per_s=20e6) for _ in range(2)),
            together_bytes_per_s=24e6,
        )
        if each.round.name == "servers at once"
        else each
        for each in in_turns
    )
    measured = measured_topology(without_links(cluster), mixed)
    assert [link.bandwidth_bytes_per_s for link in measured.links if link.b == "network"] == [25e6, 25e6]


def test_half_duplex_is_seen() -> None:
    devices = tuple(Device(global_rank=rank, server="ab"[rank], model="x", memory_bytes=1) for rank in range(2))
    cluster = ClusterTopology(
        devices=devices, links=(Link(a="a", b="b", bandwidth_bytes_per_s=1e9, latency_s=2e-5, duplex="half"),)
    )
    (first, second) = measured_topology(without_links(cluster), ideal_measurement(cluster)).links
    assert (first.a, first.b, first.duplex, first.bandwidth_bytes_per_s) == ("a", "network", "half", 1e9)
    assert (second.a, second.duplex, second.latency_s) == ("b", "half", 1e-5)


def test_flows_beside_each_other_that_hold_each_other_up_inside_a_server_get_less() -> None:
    cluster = load_topology(find_cluster_file("no_peer_access_4"))
    halved = tuple(
        MeasuredRound(
            round=each.round,
            times=tuple(
                FlowTime(latency_s=time.latency_s, bandwidth_bytes_per_s=time.bandwidth_bytes_per_s / len(each.times))
                for time in each.times
            ),
        )
        if each.round.name == "neighbours at once"
        else each
        for each in ideal_measurement(cluster)
    )
    links = measured_topology(without_links(cluster), halved).links
    assert [link.bandwidth_bytes_per_s for link in links] == [8.75e9 / 2] * 4


def test_what_was_not_measured_keeps_its_description() -> None:
    cluster = load_topology(find_cluster_file("rtx3090_v100"))
    first_only = ideal_measurement(cluster)[:1]
    assert first_only[0].round.flows == (Flow(sender=0, receiver=8),)
    measured = measured_topology(cluster, first_only)
    inside = [link for link in cluster.links if link.b != "network"]
    assert [link for link in measured.links if link.b != "network"] == inside
    assert [(link.a, link.bandwidth_bytes_per_s) for link in measured.links if link.b == "network"] == [
        ("rtx/socket 0", 3.125e9),
        ("volta/socket 0", 3.125e9),
    ]
    assert measured_topology(cluster, ()).links == cluster.links[:13] + cluster.links[13:]
    with pytest.raises(ConfigurationError, match="no links lead from rank 0"):
        measured_topology(without_links(cluster), ())


def test_speeds_are_those_of_the_layers() -> None:
    speeds = relative_speeds([{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 6.0}, {"a": 4.0, "b": 12.0}])
    assert speeds == pytest.approx((1.0, 0.5, 0.25))
    # Of unlike ratios the longer layer's counts more.
    (slow,) = (speed for speed in relative_speeds([{"a": 1.0, "b": 9.0}, {"a": 4.0, "b": 18.0}]) if speed < 1)
    assert 0.4 < slow < 0.5


def test_speeds_need_common_layers_only_in_a_chain() -> None:
    speeds = relative_speeds([{"a": 2.0}, {"a": 1.0, "b": 5.0}, {"b": 20.0}])
    assert speeds == pytest.approx((0.5, 1.0, 0.25), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: relative_speeds([{"a": 1.0}, {"b": 1.0}]), r"ranks \[1\] have measured no layer"),
        (lambda: relative_speeds([{"a": 1.0}, {}]), r"ranks \[1\]"),
        (lambda: relative_speeds([{}]), r"ranks \[0\]"),
        (lambda: relative_speeds([]), "no ranks"),
        (lambda: relative_speeds([{"a": 0.0}]), "rank 0, layer 'a': 0.0 s; a time is finite and > 0"),
        (lambda: with_speeds(load_topology(find_cluster_file("slow_network")), [1.0]), "1 speeds for 4 devices"),
    ],
)
def test_wrong_times_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_speeds_are_put_on_devices() -> None:
    cluster = with_speeds(load_topology(find_cluster_file("slow_network")), [1.0, 0.5, 1.0, 0.25])
    assert [device.relative_speed for device in cluster.devices] == [1.0, 0.5, 1.0, 0.25]
