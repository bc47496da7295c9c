"""Finds out what this host has: devices, what joins them, and its way to the network."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from lightning_autopipe.cluster import sysfs as system
from lightning_autopipe.cluster.hosts import HostDescription, HostDevice, RankPlace, join_hosts
from lightning_autopipe.cluster.nvml import SAME_SOCKET, SAME_SWITCH, Gpus, NvmlUnavailableError, load_nvml, read_gpus
from lightning_autopipe.cluster.servers import NETWORK_POINT
from lightning_autopipe.core.cluster import ClusterTopology, Link

# What transfers reach of what is printed on the box, until somebody measures: packet headers, flow control, copies.
_EFFICIENCY = {"PCIe": 0.8, "NVLink": 0.85, "InfiniBand": 0.9, "RoCE": 0.9, "Ethernet": 0.9}
_ASSUMED_PCIE_BYTES_PER_S = 15.75e9
"""PCIe 3.0 x16."""
_ASSUMED_NETWORK_BYTES_PER_S = 1.25e9
_SOCKETS_BYTES_PER_S = 20e9
"""Between two sockets; no interface tells."""
_MEMORY_BYTES_PER_S = 5e9
"""Between two processes of one host that talk through its memory."""
_LATENCY_S = {"PCIe": 5e-6, "NVLink": 2e-6, "InfiniBand": 2e-6, "RoCE": 3e-6, "Ethernet": 2e-5}
_SOCKETS_LATENCY_S = 1e-6
_MEMORY_LATENCY_S = 2e-5


def describe_host(
    *,
    load: Callable[[], Any] = load_nvml,
    sysfs: Path = Path("/sys"),
    procfs: Path = Path("/proc"),
    name: str | None = None,
    use_gpus: bool = True,
) -> HostDescription:
    """This host: its GPUs, or else its CPU as one device.

    Bandwidths are derived from what drivers say of links, times what transfers usually reach; measuring is better.

    Args:
        load: Gives the module ``pynvml``.
        sysfs: Where Linux tells of devices.
        procfs: Where Linux tells of the host.
        name: Of the host; None: its own.
        use_gpus: False for a run on the CPU.
    """
    notes: list[str] = []
    gpus = None
    if use_gpus:
        try:
            gpus = read_gpus(load())
        except NvmlUnavailableError as error:
            notes.append(f"no GPUs: {error}")
        else:
            if not gpus.gpus:
                notes.append("no GPUs: the driver knows of none")
    host = name or socket.gethostname()
    if gpus is None or not gpus.gpus:
        devices: tuple[HostDevice, ...] = (_cpu(procfs, notes),)
        links = [_link("device 0", "socket 0", "memory", _MEMORY_BYTES_PER_S, _MEMORY_LATENCY_S)]
        sockets = [0]
    else:
        devices = tuple(HostDevice(model=gpu.name, memory_bytes=gpu.memory_bytes, uuid=gpu.uuid) for gpu in gpus.gpus)
        links, sockets = _gpu_links(gpus, sysfs, notes)
    links.extend(_network_links(sysfs, sockets, notes))
    return HostDescription(
        name=host,
        identity=f"{host} {system.boot_id(procfs)}",
        devices=devices,
        links=tuple(links),
        notes=tuple(notes),
    )


def local_topology(host: HostDescription) -> ClusterTopology:
    """The topology of one host alone, a rank for each device."""
    return join_hosts([RankPlace(host=host, device_index=index) for index in range(len(host.devices))])


def _cpu(procfs: Path, notes: list[str]) -> HostDevice:
    memory_bytes = system.memory_bytes(procfs)
    if memory_bytes is None:
        memory_bytes = int(psutil.virtual_memory().total)
        notes.append("memory as psutil tells it")
    return HostDevice(model=system.cpu_model(procfs), memory_bytes=memory_bytes)


def _gpu_links(gpus: Gpus, sysfs: Path, notes: list[str]) -> tuple[list[Link], list[int]]:
    """Links between GPUs, PCIe switches and sockets; and the numbers of the sockets."""
    indices = range(len(gpus.gpus))
    sockets = _sockets(gpus, sysfs)
    switches = _groups(len(gpus.gpus), gpus.levels, SAME_SWITCH)
    links: list[Link] = []
    for number, members in enumerate(switches):
        own = {index: _pcie(gpus, index, notes) for index in members}
        # One device on a switch of its own has nobody to share it with.
        hub = f"socket {sockets[members[0]]}" if len(members) == 1 else f"switch {number}"
        links.extend(_link(f"device {index}", hub, "PCIe", own[index]) for index in members)
        if len(members) > 1:
            links.append(_link(hub, f"socket {sockets[members[0]]}", "PCIe", max(own.values()), _SOCKETS_LATENCY_S))
    links.extend(
        _link(f"device {i}", f"device {j}", "NVLink", bandwidth)
        for (i, j), bandwidth in sorted(gpus.nvlink_bytes_per_s.items())
    )
    links.extend(
        _link(f"device {index}", "nvswitch", "NVLink", gpus.nvswitch_bytes_per_s[index])
        for index in indices
        if index in gpus.nvswitch_bytes_per_s
    )
    numbers = sorted(set(sockets))
    for a, b in combinations(numbers, 2):
        links.append(_link(f"socket {a}", f"socket {b}", "sockets", _SOCKETS_BYTES_PER_S, _SOCKETS_LATENCY_S))
    if len(numbers) > 1:
        notes.append(f"between sockets {_SOCKETS_BYTES_PER_S / 1e9:g} GB/s are assumed")
    return links, numbers


def _sockets(gpus: Gpus, sysfs: Path) -> list[int]:
    """The socket of each GPU: what Linux says, else what the driver says of pairs."""
    told = [system.pci_numa_node(sysfs, gpu.bus_id) for gpu in gpus.gpus]
    if all(number is not None for number in told):
        return [number for number in told if number is not None]
    groups = _groups(len(gpus.gpus), gpus.levels, SAME_SOCKET)
    return [next(number for number, members in enumerate(groups) if index in members) for index in range(len(told))]


def _groups(number: int, levels: dict[tuple[int, int], int], at_most: int) -> list[list[int]]:
    """Devices whose nearest common point is at most so far away, together; pairs of which nothing is known: apart for
    switches, together for sockets."""
    unknown = SAME_SOCKET
    groups: list[list[int]] = []
    for index in range(number):
        for members in groups:
            if levels.get((members[0], index), unknown) <= at_most:
                members.append(index)
                break
        else:
            groups.append([index])
    return groups


def _pcie(gpus: Gpus, index: int, notes: list[str]) -> float:
    told = gpus.gpus[index].pcie_bytes_per_s
    if told is None:
        notes.append(f"device {index}: its PCIe link is assumed to be 3.0 x16")
    return told or _ASSUMED_PCIE_BYTES_PER_S


def _network_links(sysfs: Path, sockets: list[int], notes: list[str]) -> list[Link]:
    interfaces = system.network_interfaces(sysfs)
    if not interfaces:
        notes.append(f"no network interface that is up: {_ASSUMED_NETWORK_BYTES_PER_S * 8 / 1e9:g} Gb/s are assumed")
        return [
            _link(
                f"socket {sockets[0]}", NETWORK_POINT, "assumed", _ASSUMED_NETWORK_BYTES_PER_S, _LATENCY_S["Ethernet"]
            )
        ]
    links = []
    for interface in interfaces:
        bandwidth = interface.bandwidth_bytes_per_s
        if not bandwidth:
            bandwidth = _ASSUMED_NETWORK_BYTES_PER_S
            notes.append(
                f"interface {interface.name} does not tell its speed: {bandwidth * 8 / 1e9:g} Gb/s are assumed"
            )
        at = interface.numa_node if interface.numa_node in sockets else sockets[0]
        links.append(_link(f"socket {at}", NETWORK_POINT, interface.kind, bandwidth))
    return links


def _link(a: str, b: str, kind: str, bandwidth: float, latency_s: float | None = None) -> Link:
    return Link(
        a=a,
        b=b,
        kind=kind,
        bandwidth_bytes_per_s=bandwidth * _EFFICIENCY.get(kind, 1.0),
        latency_s=_LATENCY_S[kind] if latency_s is None else latency_s,
    )
