"""Reads from Linux's /sys and /proc what they tell of network interfaces, sockets and the host."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*Gb/sec")
_MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """One interface that is up."""

    name: str
    kind: str
    """``InfiniBand`` or ``Ethernet``."""
    bandwidth_bytes_per_s: float
    """0 where the driver does not tell."""
    numa_node: int | None


def read_text(path: Path) -> str | None:
    """A file's text without the space around it; None where it is not there or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # Also what reading the speed of an interface that is down gives.
        return None


def numa_node(device: Path) -> int | None:
    """The socket of a device's folder; None where there is only one, or the host does not tell (-1)."""
    text = read_text(device / "numa_node")
    return int(text) if text is not None and text.isdigit() else None


def pci_numa_node(sysfs: Path, bus_id: str) -> int | None:
    """The socket of a PCI device, by its address as drivers write it: ``00000000:3B:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return numa_node(sysfs / "bus/pci/devices" / f"{domain[-4:]:0>4}:{rest}")


def network_interfaces(sysfs: Path) -> list[NetworkInterface]:
    """The interfaces that carry traffic: active InfiniBand (or RoCE) ports, else the fastest Ethernet one."""
    ports = _infiniband(sysfs)
    if ports:
        return ports
    cards = _ethernet(sysfs)
    return [max(cards, key=lambda card: card.bandwidth_bytes_per_s)] if cards else []


def _infiniband(sysfs: Path) -> list[NetworkInterface]:
    found = []
    for card in _folders(sysfs / "class/infiniband"):
        for port in _folders(card / "ports"):
            rate = _RATE.search(read_text(port / "rate") or "")
            if "ACTIVE" in (read_text(port / "state") or "") and rate is not None:
                found.append(
                    NetworkInterface(
                        name=f"{card.name} port {port.name}",
                        kind="InfiniBand" if read_text(port / "link_layer") != "Ethernet" else "RoCE",
                        bandwidth_bytes_per_s=float(rate[1]) * 1e9 / 8,
                        numa_node=numa_node(card / "device"),
                    )
                )
    return found


def _ethernet(sysfs: Path) -> list[NetworkInterface]:
    found = []
    for card in _folders(sysfs / "class/net"):
        # Bridges, tunnels and the loopback interface have no device behind them.
        if not (card / "device").exists() or read_text(card / "operstate") not in ("up", "unknown"):
            continue
        speed = read_text(card / "speed") or ""
        found.append(
            NetworkInterface(
                name=card.name,
                kind="Ethernet",
                # An interface that is down, and most virtual ones, say -1.
                bandwidth_bytes_per_s=int(speed) * _MBIT if speed.isdigit() else 0.0,
                numa_node=numa_node(card / "device"),
            )
        )
    return found


def cpu_model(procfs: Path) -> str:
    """The processor's name; ``CPU`` where the host does not tell."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(procfs / "cpuinfo") or "", re.MULTILINE)
    return " ".join(match[1].split()) if match else "CPU"


def memory_bytes(procfs: Path) -> int | None:
    """The host's memory; None where it does not tell."""
    match = re.search(r"^MemTotal:\s*(\d+)\s*kB$", read_text(procfs / "meminfo") or "", re.MULTILINE)
    return int(match[1]) << 10 if match else None


def boot_id(procfs: Path) -> str:
    """Differs between hosts, and between containers' hosts of one name; empty where the host does not tell."""
    return read_text(procfs / "sys/kernel/random/boot_id") or ""


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
