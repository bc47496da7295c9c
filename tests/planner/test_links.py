from __future__ import annotations

import pytest

from lightning_autopipe.core import ClusterTopology, ConfigurationError, Device, Link
from lightning_autopipe.planner.links import LinkNetwork, max_min_rates
from lightning_autopipe.planner.transfers import Transfers
from tests.planner.steps import servers


def test_shares_are_max_min_fair() -> None:
    """Three transfers over a channel of 12, of which one is held to 2 elsewhere: the others get what it leaves."""
    assert max_min_rates([(0,), (0,), (0, 1)], [12.0, 2.0]) == [5.0, 5.0, 2.0]
    assert max_min_rates([(0,)], [3.0]) == [3.0]
    assert max_min_rates([(0, 1), (1, 2), (2,)], [10.0, 4.0, 3.0]) == [2.5, 1.5, 1.5]


def test_a_way_leads_over_switches_and_names_its_slowest_link() -> None:
    devices = tuple(Device(global_rank=rank, server="AB"[rank // 2], model="gpu", memory_bytes=1) for rank in range(4))
    links = (
        Link(a="rank 0", b="A", bandwidth_bytes_per_s=12e9, latency_s=1e-6, duplex="half"),
        Link(a="rank 1", b="A", bandwidth_bytes_per_s=12e9, latency_s=1e-6, duplex="half"),
        Link(a="A", b="switch", bandwidth_bytes_per_s=3e9, latency_s=1e-5),
        Link(a="switch", b="B", bandwidth_bytes_per_s=1e9, latency_s=1e-5),
    )
    network = LinkNetwork(ClusterTopology(devices=devices, links=links))
    there, back = network.route(0, 3), network.route(3, 0)
    assert (there.bandwidth_bytes_per_s, there.latency_s) == (1e9, pytest.approx(2.1e-5))
    assert len(there.channels) == 3
    assert set(there.channels) & set(back.channels) == {there.channels[0]}  # half duplex: both directions in one
    assert network.route(2, 3).channels == ()  # at one point
    assert len(network.route(0, 1).channels) == 2


def test_no_way_leads_through_another_device() -> None:
    devices = tuple(Device(global_rank=rank, server="A", model="gpu", memory_bytes=1) for rank in range(3))
    to_switch = [Link(a=f"rank {rank}", b="A", bandwidth_bytes_per_s=1e9) for rank in range(3)]
    bridges = [Link(a=f"rank {rank}", b=f"rank {rank + 1}", bandwidth_bytes_per_s=50e9) for rank in range(2)]
    network = LinkNetwork(ClusterTopology(devices=devices, links=(*to_switch, *bridges)))
    assert network.route(0, 1).bandwidth_bytes_per_s == 50e9
    assert network.route(0, 2).bandwidth_bytes_per_s == 1e9


def test_of_two_ways_the_faster_is_taken() -> None:
    slow = Link(a="A", b="B", bandwidth_bytes_per_s=1e6)
    fast = [Link(a=a, b=b, bandwidth_bytes_per_s=1e9) for a, b in ("AC", "CB")]
    assert servers("AB", slow, *fast).route(0, 1).bandwidth_bytes_per_s == 1e9


def test_devices_without_links_between_them_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no links from 'A' to 'B'; add a Link"):
        servers("AB").route(0, 1)


def test_channels_with_room_for_all_slow_nobody() -> None:
    """Two routes over a wide channel into a narrow one each: none of their shares depends on the other."""
    links = [
        Link(a="A", b="C", bandwidth_bytes_per_s=10.0),
        Link(a="C", b="D", bandwidth_bytes_per_s=3.0),
        Link(a="C", b="E", bandwidth_bytes_per_s=4.0),
    ]
    network = servers("ADE", *links)
    routes = [network.route(0, 1), network.route(0, 2)]
    events: list[tuple[float, int, int]] = []
    numbers = iter(range(100))
    transfers = Transfers(events, numbers.__next__, routes, network.channels, 0)
    transfers.send(0, (6.0, 0.0, 0, 0, 0.0))
    transfers.send(1, (6.0, 0.0, 0, 0, 0.0))
    assert sorted((when, who) for when, _, who in events) == [(1.5, 1), (2.0, 0)]
