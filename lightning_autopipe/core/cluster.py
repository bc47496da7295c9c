"""The devices that a pipeline can run on and the links between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_autopipe.core._checks import check_int, check_number, check_text, check_tuple
from lightning_autopipe.core.errors import ConfigurationError

DUPLEX_MODES = ("full", "half")
SHARING_MODES = ("fair", "fifo")
_RANK_POINT = re.compile(r"rank (0|[1-9]\d*)")
_WORD = re.compile(r"[a-z0-9]+")
_OF_OTHER_MODELS = frozenset({"ti", "super", "laptop", "mobile", "max", "q", "d"})
"""Words that make another model of a name."""


def rank_point(global_rank: int) -> str:
    """Name of the point at which a rank's device stands where links name it."""
    return f"rank {global_rank}"


def rank_of_point(point: str) -> int | None:
    """The global rank whose device stands at a point; None for all other points."""
    match = _RANK_POINT.fullmatch(point)
    return None if match is None else int(match[1])


def is_same_model(name: str, found: str) -> bool:
    """Whether a device that its driver calls ``found`` is of the model that people call ``name``.

    ``"NVIDIA GeForce RTX 3090"`` has all words of ``"RTX 3090"``, so it is; the same with ``Ti`` is another model.
    """
    words, words_found = (set(_WORD.findall(text.lower())) for text in (name, found))
    return name == found or (bool(words) and words <= words_found and not (words_found - words) & _OF_OTHER_MODELS)


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
        if rank_of_point(self.server) is not None:
            raise ConfigurationError(f"{owner}: server must not be {self.server!r}, which names a device's own point")
        check_text(owner, "model", self.model, error=ConfigurationError)
        check_int(owner, "memory_bytes", self.memory_bytes, minimum=1, error=ConfigurationError)
        check_number(owner, "relative_speed", self.relative_speed, error=ConfigurationError, exclusive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link between two points of the cluster: ranks' devices (``rank 3``), switches, sockets, servers, by name."""

    a: str
    b: str
    bandwidth_bytes_per_s: float
    """In each direction where the link is full duplex, in both together where it is half duplex."""
    latency_s: float = 0.0
    duplex: str = "full"
    sharing: str = "fair"
    """How concurrent transfers share the link: ``fair`` (equal shares) or ``fifo`` (one after the other)."""
    kind: str = ""
    """What it is made of, such as ``NVLink``, for reports; nothing is decided by it."""

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
        if not isinstance(self.kind, str):
            raise ConfigurationError(f"{owner}: kind must be a string, got {self.kind!r}")


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
        for index, link in enumerate(self.links):
            for point in (link.a, link.b):
                global_rank = rank_of_point(point)
                if global_rank is not None and global_rank >= len(self.devices):
                    raise ConfigurationError(
                        f"ClusterTopology: links[{index}] leads to {point!r}, but there are {len(self.devices)} "
                        f"devices: ranks 0 to {len(self.devices) - 1}"
                    )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers, in the order of their first global ranks."""
        return tuple(dict.fromkeys(device.server for device in self.devices))

    def server_ranks(self, server: str) -> tuple[int, ...]:
        """Global ranks of a server's devices, ascending; empty where the server is not known."""
        return tuple(device.global_rank for device in self.devices if device.server == server)
