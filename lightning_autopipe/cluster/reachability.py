"""Whether links lead somewhere, and join all devices."""

from __future__ import annotations

from collections import defaultdict

from lightning_autopipe.core.cluster import ClusterTopology, rank_of_point, rank_point
from lightning_autopipe.core.errors import ConfigurationError


def device_points(topology: ClusterTopology) -> tuple[str, ...]:
    """The point at which each rank's device stands: its own where a link names that, else its server's."""
    named = {point for link in topology.links for point in (link.a, link.b)}
    return tuple(
        own if (own := rank_point(device.global_rank)) in named else device.server for device in topology.devices
    )


def check_reachable(topology: ClusterTopology) -> None:
    """Refuse a topology in which links end nowhere or devices cannot reach each other.

    Raises:
        ConfigurationError: naming the link, or the two devices.
    """
    points = device_points(topology)
    neighbours: dict[str, list[str]] = defaultdict(list)
    for link in topology.links:
        neighbours[link.a].append(link.b)
        neighbours[link.b].append(link.a)
    inhabited = {*points, *topology.servers}
    for index, link in enumerate(topology.links):
        for point, other in ((link.a, link.b), (link.b, link.a)):
            if len(neighbours[point]) == 1 and point not in inhabited and rank_of_point(point) is None:
                raise ConfigurationError(
                    f"the link {link.a} - {link.b} (links[{index}]) leads nowhere: no device is at {point!r}, and no "
                    f"other link; points with one link are misspelt or not needed. {other!r} is linked to "
                    f"{_some(neighbours[other])}"
                )
    reached = {points[0]}
    border = [points[0]]
    while border:
        for neighbour in neighbours[border.pop()]:
            if neighbour not in reached:
                reached.add(neighbour)
                border.append(neighbour)
    for device, point in zip(topology.devices, points, strict=True):
        if point not in reached:
            first = topology.devices[0]
            raise ConfigurationError(
                f"no links lead from rank 0 (server {first.server!r}, at {points[0]!r}) to rank {device.global_rank} "
                f"(server {device.server!r}, at {point!r}); join them by links, or each of them with a common point"
            )


def _some(names: list[str]) -> str:
    shown = sorted(set(names))
    return ", ".join(map(repr, shown[:5])) + (", …" if len(shown) > 5 else "")
