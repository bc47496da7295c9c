"""Expands servers as people describe them, templates and counts, into devices and links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from lightning_autopipe.cluster.document import Entry
from lightning_autopipe.core.cluster import DUPLEX_MODES, SHARING_MODES, Device, Link, rank_of_point, rank_point
from lightning_autopipe.core.quantities import BANDWIDTH, DURATION, MEMORY

NETWORK_POINT = "network"
_MAX_DEVICES = 16_384
_LINK_OPTIONS = ("latency", "duplex", "sharing", "kind")
_DEVICE_RANGE = re.compile(r"device (\d+)(?:\s*-\s*(\d+))?")


def read_servers(servers: Entry, links: Entry | None) -> tuple[list[Device], list[Link]]:
    """Devices in the order of their global ranks, and all links.

    Args:
        servers: The list of servers.
        links: Links between servers' points and points of all, if any.

    Raises:
        ConfigurationError: what is wrong, and where.
    """
    devices: list[Device] = []
    expanded: list[Link] = []
    names: set[str] = set()
    for item in servers.items(of="servers"):
        members = item.mapping(required=("name", "devices"), optional=("count", "links", "network"))
        for name in _names(members):
            if name in names:
                raise members["name"].error(f"two servers are called {name!r}; each needs a name of its own")
            names.add(name)
            first_rank = len(devices)
            devices.extend(_devices(members["devices"], server=name, first_rank=first_rank))
            expanded.extend(_server_links(members, _Server(name, first_rank, len(devices) - first_rank)))
    if links is not None:
        for item in links.items(of="links"):
            members = item.mapping(required=("between", "bandwidth"), optional=_LINK_OPTIONS)
            a, b = (end.text() for end in _ends(members["between"]))
            expanded.append(_link(item, members, a, b))
    return devices, expanded


class _Server:
    """Where a server's devices and points are."""

    def __init__(self, name: str, first_rank: int, num_devices: int) -> None:
        self.name = name
        self._first_rank = first_rank
        self._num_devices = num_devices

    def points(self, entry: Entry) -> list[str]:
        """Points of the cluster that a name used inside the server means: several for ``device 0-3``."""
        text = entry.text()
        if text == "server":
            return [self.name]
        if not text.startswith("device"):
            if "/" in text or rank_of_point(text) is not None:
                raise entry.error(
                    f"{text!r} is no point inside a server; allowed are 'device 0', 'device 0-3', 'server', or a name "
                    "without '/'; links between servers stand under the file's own 'links'"
                )
            return [self.point(text)]
        match = _DEVICE_RANGE.fullmatch(text)
        if match is None:
            raise entry.error(f"{text!r}: devices are called 'device 0', several 'device 0-3'")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < self._num_devices:
            raise entry.error(
                f"{text!r}: server {self.name!r} has {self._num_devices} devices: 0 to {self._num_devices - 1}"
            )
        return [rank_point(self._first_rank + index) for index in range(first, last + 1)]

    def point(self, name: str) -> str:
        """A switch, socket or other point of this server alone."""
        return f"{self.name}/{name}"


def _names(members: Mapping[str, Entry]) -> list[str]:
    name = members["name"].text()
    if "/" in name or rank_of_point(name) is not None or name == NETWORK_POINT:
        raise members["name"].error(f"{name!r} cannot be a server's name: no '/', not 'rank N', not {NETWORK_POINT!r}")
    count = members["count"].integer(minimum=1, maximum=_MAX_DEVICES) if "count" in members else 1
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def _devices(entry: Entry, *, server: str, first_rank: int) -> Iterator[Device]:
    global_rank = first_rank
    for item in entry.items(of="devices"):
        members = item.mapping(required=("model", "memory"), optional=("speed", "count"))
        count = members["count"].integer(minimum=1, maximum=_MAX_DEVICES) if "count" in members else 1
        if global_rank + count > _MAX_DEVICES:
            raise item.error(f"more than {_MAX_DEVICES} devices")
        for _ in range(count):
            yield item.build(
                Device,
                global_rank=global_rank,
                server=server,
                model=members["model"].text(),
                memory_bytes=int(members["memory"].quantity(MEMORY)),
                relative_speed=members["speed"].number() if "speed" in members else 1.0,
            )
            global_rank += 1


def _server_links(members: Mapping[str, Entry], server: _Server) -> Iterator[Link]:
    if "links" in members:
        for item in members["links"].items(of="links"):
            options = item.mapping(required=("between", "bandwidth"), optional=_LINK_OPTIONS)
            ends = _ends(options["between"])
            done: set[frozenset[str]] = set()
            for a, b in product(*(server.points(end) for end in ends)):
                # Where both ends are ranges: each pair once.
                if a != b and frozenset((a, b)) not in done:
                    done.add(frozenset((a, b)))
                    yield _link(item, options, a, b)
            if not done:
                raise options["between"].error("both ends are the same point; a link joins two different ones")
    network = members.get("network")
    if network is None:
        return
    for item in network.items(of="network links") if isinstance(network.value, list) else [network]:
        options = item.mapping(required=("bandwidth",), optional=("at", "to", *_LINK_OPTIONS))
        end = options["to"].text() if "to" in options else NETWORK_POINT
        for begin in server.points(options["at"]) if "at" in options else [server.name]:
            yield _link(item, options, begin, end)


def _ends(entry: Entry) -> list[Entry]:
    ends = entry.items(of="two points")
    if len(ends) != 2:
        raise entry.error(f"a link joins two points, got {len(ends)}")
    return ends


def _link(item: Entry, options: Mapping[str, Entry], a: str, b: str) -> Link:
    return item.build(
        Link,
        a=a,
        b=b,
        bandwidth_bytes_per_s=options["bandwidth"].quantity(BANDWIDTH),
        latency_s=options["latency"].quantity(DURATION) if "latency" in options else 0.0,
        duplex=options["duplex"].choice(DUPLEX_MODES) if "duplex" in options else "full",
        sharing=options["sharing"].choice(SHARING_MODES) if "sharing" in options else "fair",
        kind=options["kind"].text() if "kind" in options else "",
    )
