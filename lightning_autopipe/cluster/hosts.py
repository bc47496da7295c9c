"""What each host has, as it describes itself, and how the hosts of a run become one topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_autopipe.cluster.reachability import check_reachable
from lightning_autopipe.cluster.servers import NETWORK_POINT
from lightning_autopipe.core.cluster import ClusterTopology, Device, Link, rank_of_point, rank_point
from lightning_autopipe.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """One device of a host."""

    model: str
    memory_bytes: int
    uuid: str = ""
    """As the driver and ``torch.cuda.get_device_properties`` tell it, without ``GPU-``; empty for a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDescription:
    """One host; plain data, to be sent to the other processes."""

    name: str
    identity: str
    """Equal for all processes of one host, and different from other hosts' even where names are equal."""
    devices: tuple[HostDevice, ...]
    links: tuple[Link, ...] = ()
    """Between points of this host: ``device 0``, ``socket 0``, …, and from one of them to the network."""
    notes: tuple[str, ...] = ()
    """What could not be found out and was assumed."""

    def device_index(self, uuid: str) -> int:
        """Position of the device with a UUID: the CUDA order may differ, and leave devices out.

        Raises:
            ConfigurationError: there is none.
        """
        known = [device.uuid for device in self.devices]
        if (own := uuid.removeprefix("GPU-")) not in known:
            raise ConfigurationError(f"host {self.name!r} has no device with UUID {own!r}; it has {known}")
        return known.index(own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs."""

    host: HostDescription
    device_index: int = 0
    """Position in ``host.devices``."""


def join_hosts(places: Sequence[RankPlace]) -> ClusterTopology:
    """The topology of a run, from where each of its ranks runs.

    Ranks that share a device have its memory and its speed in equal parts. Only devices with a rank are in the
    topology. Hosts of equal names get numbers. Where all links of the cluster are on one host, it needs no network.

    Args:
        places: Of each global rank, in the order that the launcher gave; each rank may have its own copy of its host's
            description (the first one counts).

    Raises:
        ConfigurationError: a device that its host does not have; no rank at all; hosts that nothing joins.
    """
    hosts: dict[str, HostDescription] = {}
    for global_rank, place in enumerate(places):
        host = hosts.setdefault(place.host.identity, place.host)
        if not 0 <= place.device_index < len(host.devices):
            raise ConfigurationError(
                f"rank {global_rank} says that it has device {place.device_index} of host {host.name!r}, which has "
                f"{len(host.devices)}: 0 to {len(host.devices) - 1}"
            )
    names = _server_names(hosts)
    users = Counter((place.host.identity, place.device_index) for place in places)
    fewest = min(users.values(), default=1)
    devices = []
    for global_rank, place in enumerate(places):
        device = hosts[place.host.identity].devices[place.device_index]
        sharers = users[place.host.identity, place.device_index]
        devices.append(
            Device(
                global_rank=global_rank,
                server=names[place.host.identity],
                model=device.model,
                memory_bytes=device.memory_bytes // sharers,
                relative_speed=fewest / sharers,
            )
        )
    links: list[Link] = []
    for identity, host in hosts.items():
        ranks_of_device: dict[str, list[str]] = {f"device {index}": [] for index in range(len(host.devices))}
        for global_rank, place in enumerate(places):
            if place.host.identity == identity:
                ranks_of_device[f"device {place.device_index}"].append(rank_point(global_rank))
        links.extend(_host_links(host, names[identity], ranks_of_device))
    topology = ClusterTopology(devices=tuple(devices), links=_without_dead_ends(links))
    check_reachable(topology)
    return topology


def _server_names(hosts: dict[str, HostDescription]) -> dict[str, str]:
    total = Counter(host.name for host in hosts.values())
    seen: Counter[str] = Counter()
    names = {}
    for identity, host in hosts.items():
        names[identity] = host.name if total[host.name] == 1 else f"{host.name}-{seen[host.name]}"
        seen[host.name] += 1
    return names


def _host_links(host: HostDescription, server: str, ranks_of_device: dict[str, list[str]]) -> list[Link]:
    def points(name: str) -> list[str]:
        if name in ranks_of_device:
            return ranks_of_device[name]
        return [name if name == NETWORK_POINT else f"{server}/{name}"]

    return [replace(link, a=a, b=b) for link in host.links for a in points(link.a) for b in points(link.b)]


def _without_dead_ends(links: list[Link]) -> tuple[Link, ...]:
    """Without links to points behind which no rank is: switches of unused devices, the network of a single host."""
    while True:
        ends = Counter(point for link in links for point in (link.a, link.b))
        kept = [
            link
            for link in links
            if all(ends[point] > 1 or rank_of_point(point) is not None for point in (link.a, link.b))
        ]
        if len(kept) == len(links):
            return tuple(kept)
        links = kept
