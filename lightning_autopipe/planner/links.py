"""The links between devices as a graph: which way a transfer goes, and what it gets of a link that it shares."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from lightning_autopipe.core.cluster import ClusterTopology, Device, rank_of_point, rank_point
from lightning_autopipe.core.errors import ConfigurationError

_TYPICAL_BYTES = 2**20
"""Of two ways the one is taken that is faster for a message of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """What carries bytes: one direction of a full-duplex link, or a half-duplex link."""

    link_index: int
    bandwidth_bytes_per_s: float
    is_fifo: bool
    """Whether transfers use it one after the other instead of sharing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one device to another."""

    channels: tuple[int, ...] = ()
    """Positions in `LinkNetwork.channels`; none where the devices are joined by nothing that takes time."""
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    """Of its slowest channel."""

    def occupied_s(self, num_bytes: float) -> float:
        """How long a message that shares its way with no other occupies it."""
        return num_bytes / self.bandwidth_bytes_per_s


class LinkNetwork:
    """Routes over a cluster's links.

    A device stands at the point ``"rank N"`` where a link names it, else at its server's. Devices at one point reach
    each other in no time. No way leads through a third device.

    Args:
        topology: devices and links.
    """

    def __init__(self, topology: ClusterTopology) -> None:
        self.topology = topology
        channels: list[Channel] = []
        self._ways: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for index, link in enumerate(topology.links):
            channel = Channel(
                link_index=index,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                is_fifo=link.sharing == "fifo",
            )
            self._ways[link.a].append((link.b, len(channels)))
            channels.append(channel)
            if link.duplex == "full":
                channels.append(channel)
            self._ways[link.b].append((link.a, len(channels) - 1))
        self.channels = tuple(channels)
        self._routes: dict[tuple[int, int], Route] = {}
        self._trees: dict[str, dict[str, tuple[str, int]]] = {}

    def route(self, sender: int, receiver: int) -> Route:
        """The way from one global rank to another.

        Raises:
            ConfigurationError: no links lead there.
        """
        key = (sender, receiver)
        if key not in self._routes:
            self._routes[key] = self._route(self.point(sender), self.point(receiver))
        return self._routes[key]

    def point(self, global_rank: int) -> str:
        """Where a device stands."""
        own = rank_point(global_rank)
        return own if own in self._ways else self.topology.devices[global_rank].server

    def _route(self, begin: str, end: str) -> Route:
        if begin not in self._trees:
            self._trees[begin] = self._quickest_ways(begin)
        tree, links = self._trees[begin], self.topology.links
        channels: list[int] = []
        point = end
        while point != begin:
            if point not in tree:
                raise ConfigurationError(
                    f"the cluster has no links from {begin!r} to {end!r}; add a Link between them, or between each and "
                    "a switch"
                )
            point, channel = tree[point]
            channels.append(channel)
        channels.reverse()
        used = [self.channels[channel] for channel in channels]
        return Route(
            channels=tuple(channels),
            latency_s=sum(links[channel.link_index].latency_s for channel in used),
            bandwidth_bytes_per_s=min((channel.bandwidth_bytes_per_s for channel in used), default=math.inf),
        )

    def _quickest_ways(self, begin: str) -> dict[str, tuple[str, int]]:
        """For each point that can be reached, the one before it on the way and the channel in between."""
        links = self.topology.links
        order = count()
        heap: list[tuple[float, int, str, str, int]] = [(0.0, next(order), begin, "", -1)]
        tree: dict[str, tuple[str, int]] = {}
        while heap:
            seconds, _, point, before, last = heapq.heappop(heap)
            if point in tree:
                continue
            tree[point] = (before, last)
            if point != begin and rank_of_point(point) is not None:
                continue  # a device hands nothing on
            for neighbour, channel in self._ways[point]:
                if neighbour not in tree:
                    link = links[self.channels[channel].link_index]
                    cost = link.latency_s + _TYPICAL_BYTES / link.bandwidth_bytes_per_s
                    heapq.heappush(heap, (seconds + cost, next(order), neighbour, point, channel))
        return tree


def max_min_rates(routes: Sequence[Sequence[int]], bandwidths: Sequence[float]) -> list[float]:
    """Bytes per second of concurrent transfers that share channels fairly.

    Of all channels the one with the least left for each of its transfers is filled up first; its transfers get that,
    and so on with the rest: no transfer can get more without one getting less that has no more than it.

    Args:
        routes: channels of each transfer, at least one.
        bandwidths: of each channel.
    """
    rates = [-1.0] * len(routes)
    users: dict[int, list[int]] = {}
    for transfer, route in enumerate(routes):
        for channel in route:
            users.setdefault(channel, []).append(transfer)
    left = {channel: bandwidths[channel] for channel in users}
    num_users = {channel: len(transfers) for channel, transfers in users.items()}
    while num_users:
        least, tightest = math.inf, -1
        for channel, number in num_users.items():
            share = left[channel] / number
            if share < least:
                least, tightest = share, channel
        for transfer in users[tightest]:
            if rates[transfer] < 0:
                rates[transfer] = least
                for channel in routes[transfer]:
                    left[channel] = max(0.0, left[channel] - least)
                    num_users[channel] -= 1
                    if not num_users[channel]:
                        del num_users[channel]
    return rates


def alike_devices(num_devices: int, *, memory_bytes: int = 2**62) -> LinkNetwork:
    """Devices like the profiled one, by default with all the memory needed, between which transfers take no time."""
    devices = tuple(
        Device(global_rank=rank, server="one server", model="the profiled device", memory_bytes=memory_bytes)
        for rank in range(num_devices)
    )
    return LinkNetwork(ClusterTopology(devices=devices))
