"""The devices that a pipeline can run on and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_int, check_number, check_text, check_tuple
from lightning_autopipe.core.errors import ConfigurationError

DUPLEX_MODES = ("full", "half")
SHARING_MODES = ("fair", "fifo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or CPU process) and what it can do."""

    global_rank: int
    server: str
    """Name of the server that it is in; equal names are the same server."""
    model: str
    """Name of the device model, as profiles are kept by it."""
    memory_bytes: int
    relative_speed: float = 1.0
    """Work per second against the cluster's reference device; used where no times of this model are known."""

    def __post_init__(self) -> None:
        check_int("Device", "global_rank", self.global_rank, minimum=0, error=ConfigurationError)
        owner = f"Device {self.global_rank}"
        check_text(owner, "server", self.server, error=ConfigurationError)
        check_text(owner, "model", self.model, error=ConfigurationError)
        check_int(owner, "memory_bytes", self.memory_bytes, minimum=1, error=ConfigurationError)
        check_number(owner, "relative_speed", self.relative_speed, error=ConfigurationError, exclusive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link between two points of the cluster: ranks' devices, switches, sockets or servers, by name."""

    a: str
    b: str
    bandwidth_bytes_per_s: float
    """In each direction where the link is full duplex, in both together where it is half duplex."""
    latency_s: float = 0.0
    duplex: str = "full"
    sharing: str = "fair"
    """How concurrent transfers share the link: ``fair`` (equal shares) or ``fifo`` (one after the other)."""

    def __post_init__(self) -> None:
        check_text("Link", "a", self.a, error=ConfigurationError)
        check_text("Link", "b", self.b, error=ConfigurationError)
        owner = f"Link {self.a} - {self.b}"
        if self.a == self.b:
            raise ConfigurationError(f"{owner}: both ends are {self.a!r}; a link joins two different points")
        check_number(
            owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, error=ConfigurationError, exclusive=True
        )
        check_number(owner, "latency_s", self.latency_s, error=ConfigurationError)
        for name, allowed in (("duplex", DUPLEX_MODES), ("sharing", SHARING_MODES)):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{owner}: {name} must be one of {allowed}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopology:
    """All devices, one a global rank, and the links between them."""

    devices: tuple[Device, ...]
    """In the order of their global ranks 0, 1, …"""
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        check_tuple("ClusterTopology", "devices", self.devices, Device, error=ConfigurationError)
        check_tuple("ClusterTopology", "links", self.links, Link, error=ConfigurationError)
        if not self.devices:
            raise ConfigurationError("ClusterTopology: devices is empty; a cluster has at least one device")
        for position, device in enumerate(self.devices):
            if device.global_rank != position:
                raise ConfigurationError(
                    f"ClusterTopology: devices[{position}] has global_rank {device.global_rank}; devices are listed by "
                    f"global rank, 0 to {len(self.devices) - 1}, each once"
                )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.devices)
