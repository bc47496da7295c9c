"""Clusters of unlike servers that nobody owns, for benchmarks and tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_autopipe.cluster.servers import NETWORK_POINT
from lightning_autopipe.core._checks import check_int
from lightning_autopipe.core.cluster import ClusterTopology, Device, Link, rank_point
from lightning_autopipe.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """A kind of server: its devices hang on switches, those on a socket, and the first socket on the network."""

    model: str
    memory_bytes: int
    relative_speed: float
    num_devices: int
    devices_per_switch: int
    device_bytes_per_s: float
    """Between a device and its switch."""
    switch_bytes_per_s: float
    """Between a switch and the server's other switches and its network interface."""
    network_bytes_per_s: float
    network_latency_s: float
    nvlink_bytes_per_s: float = 0.0
    """Between the two devices of a pair (0 and 1, 2 and 3, …); 0 where there is no NVLink."""
    sharing: str = "fair"


SERVER_KINDS = (
    ServerKind(
        model="A100",
        memory_bytes=80 * 10**9,
        relative_speed=1.0,
        num_devices=8,
        devices_per_switch=8,
        device_bytes_per_s=230e9,
        switch_bytes_per_s=48e9,
        network_bytes_per_s=23e9,
        network_latency_s=3e-6,
    ),
    ServerKind(
        model="RTX 3090",
        memory_bytes=24 * 10**9,
        relative_speed=0.45,
        num_devices=8,
        devices_per_switch=4,
        device_bytes_per_s=24e9,
        switch_bytes_per_s=20e9,
        network_bytes_per_s=11.5e9,
        network_latency_s=3e-6,
        nvlink_bytes_per_s=48e9,
    ),
    ServerKind(
        model="V100",
        memory_bytes=32 * 10**9,
        relative_speed=0.4,
        num_devices=4,
        devices_per_switch=4,
        device_bytes_per_s=120e9,
        switch_bytes_per_s=12e9,
        network_bytes_per_s=2.9e9,
        network_latency_s=2e-5,
    ),
    ServerKind(
        model="RTX 4090",
        memory_bytes=24 * 10**9,
        relative_speed=0.8,
        num_devices=8,
        devices_per_switch=4,
        device_bytes_per_s=25e9,
        switch_bytes_per_s=20.5e9,
        network_bytes_per_s=2.9e9,
        network_latency_s=2e-5,
        sharing="fifo",
    ),
    ServerKind(
        model="RTX 2080 Ti",
        memory_bytes=11 * 10**9,
        relative_speed=0.25,
        num_devices=4,
        devices_per_switch=2,
        device_bytes_per_s=8.75e9,
        switch_bytes_per_s=8.75e9,
        network_bytes_per_s=1.15e9,
        network_latency_s=3e-5,
    ),
)


def synthetic_cluster(
    num_servers: int,
    *,
    devices_per_server: int | None = None,
    kinds: tuple[ServerKind, ...] = SERVER_KINDS,
    seed: int = 0,
) -> ClusterTopology:
    """A cluster of servers of unlike kinds, the same for the same arguments.

    Each kind comes once before any comes again, in an order drawn by ``seed``; no two servers are quite alike, their
    speeds and networks differ by up to a tenth.

    Args:
        num_servers: At least one.
        devices_per_server: Of every server; None: as many as its kind has. 128 servers of 8 are 1,024 devices.
        kinds: To draw from.
        seed: Of the draws.

    Raises:
        ConfigurationError: a number below one, or no kinds.
    """
    check_int("synthetic_cluster", "num_servers", num_servers, minimum=1, error=ConfigurationError)
    if devices_per_server is not None:
        check_int("synthetic_cluster", "devices_per_server", devices_per_server, minimum=1, error=ConfigurationError)
    if not kinds:
        raise ConfigurationError("synthetic_cluster: kinds is empty; servers are drawn from at least one")
    draw = random.Random(seed)
    order: list[ServerKind] = []
    while len(order) < num_servers:
        order.extend(draw.sample(kinds, len(kinds)))
    devices: list[Device] = []
    links: list[Link] = []
    for index, kind in enumerate(order[:num_servers]):
        server = f"{kind.model.lower().replace(' ', '-')}-{index}"
        speed = kind.relative_speed * draw.uniform(0.9, 1.0)
        ranks = range(len(devices), len(devices) + (devices_per_server or kind.num_devices))
        devices.extend(
            Device(
                global_rank=rank, server=server, model=kind.model, memory_bytes=kind.memory_bytes, relative_speed=speed
            )
            for rank in ranks
        )
        links.extend(_server_links(server, kind, ranks))
        links.append(
            Link(
                a=server,
                b=NETWORK_POINT,
                bandwidth_bytes_per_s=kind.network_bytes_per_s * draw.uniform(0.9, 1.0),
                latency_s=kind.network_latency_s,
                sharing=kind.sharing,
                kind="network",
            )
        )
    return ClusterTopology(devices=tuple(devices), links=tuple(links))


def _server_links(server: str, kind: ServerKind, ranks: range) -> list[Link]:
    links: list[Link] = []
    for offset in range(0, len(ranks), kind.devices_per_switch):
        switch = f"{server}/switch {offset // kind.devices_per_switch}"
        members = ranks[offset : offset + kind.devices_per_switch]
        links.extend(_link(rank_point(rank), switch, kind.device_bytes_per_s, 3e-6, "PCIe") for rank in members)
        links.append(_link(switch, server, kind.switch_bytes_per_s, 1e-6, "PCIe"))
    if kind.nvlink_bytes_per_s:
        links.extend(
            _link(rank_point(a), rank_point(b), kind.nvlink_bytes_per_s, 2e-6, "NVLink")
            for a, b in zip(ranks[::2], ranks[1::2], strict=False)
        )
    return links


def _link(a: str, b: str, bandwidth: float, latency_s: float, kind: str) -> Link:
    return Link(a=a, b=b, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, kind=kind)
