"""Topologies as files: YAML or JSON, in a form for people (`servers`) or with every device and link listed (`devices`).

The form for people::

    schema_version: 1
    servers:                       # global ranks count through them, in this order
      - name: titan                # with a count: titan-0, titan-1, …
        count: 2
        devices:
          - {model: RTX 3090, memory: 24 GB, speed: 1.0, count: 4}
        links:                     # inside the server; "device 0-3" are four of its devices, one link each
          - {between: [device 0-3, socket 0], kind: PCIe, bandwidth: 13 GB/s, latency: 5 us}
          - {between: [device 0, device 1], kind: NVLink, bandwidth: 50 GB/s}
        network: {at: socket 0, bandwidth: 100 Gb/s, latency: 2 us, duplex: full, sharing: fair}

Without ``links`` the devices of a server reach each other in no time, and the network begins at the server itself. A
server's points are called ``titan-0/socket 0`` outside it; those that no link of the server itself begins with
(``network``, a switch for racks) belong to all.

What `save_topology` writes lists everything with plain numbers, so that loading it gives an equal topology::

    schema_version: 1
    devices: [{global_rank: 0, server: titan-0, model: RTX 3090, memory_bytes: 24000000000, relative_speed: 1.0}]
    links: [{a: rank 0, b: titan-0/socket 0, bandwidth_bytes_per_s: 1.3e+10, latency_s: 5.0e-06, duplex: full,
             sharing: fair, kind: PCIe}]
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

from lightning_autopipe.cluster.document import Entry, read_file, read_text, write_yaml
from lightning_autopipe.cluster.reachability import check_reachable
from lightning_autopipe.cluster.servers import read_servers
from lightning_autopipe.core.cluster import DUPLEX_MODES, SHARING_MODES, ClusterTopology, Device, Link
from lightning_autopipe.core.files import write_whole

SCHEMA_VERSION = 1
_DEVICE_FIELDS = tuple(field.name for field in fields(Device))
_LINK_FIELDS = tuple(field.name for field in fields(Link))
_NEEDED_DEVICE_FIELDS = ("global_rank", "server", "model", "memory_bytes")
_NEEDED_LINK_FIELDS = ("a", "b", "bandwidth_bytes_per_s")


def load_topology(path: str | os.PathLike[str]) -> ClusterTopology:
    """The topology in a file, YAML or (``.json``) JSON, of either form.

    Raises:
        ConfigurationError: file, line and place, the value, and what is allowed there; or devices that no links join.
    """
    return _topology(read_file(Path(path)))


def topology_from_text(text: str, *, source: str = "cluster", is_json: bool = False) -> ClusterTopology:
    """As `load_topology`, from the text of a file; ``source`` is what errors call it."""
    return _topology(read_text(text, source=source, is_json=is_json))


def save_topology(topology: ClusterTopology, path: str | os.PathLike[str]) -> None:
    """Write every device and link of a topology: JSON where the name ends in ``.json``, else YAML. Whole or not at all.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    path = Path(path)
    document = {
        "schema_version": SCHEMA_VERSION,
        "devices": [asdict(device) for device in topology.devices],
        "links": [asdict(link) for link in topology.links],
    }
    if path.suffix.lower() == ".json":
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    else:
        text = write_yaml(document)
    write_whole(path, text)


def _topology(document: Entry) -> ClusterTopology:
    is_mapping = isinstance(document.value, dict)
    if not is_mapping or "schema_version" not in document.value:
        raise document.error(
            f"this is no cluster file: it begins with 'schema_version: {SCHEMA_VERSION}', then 'servers' (for people) "
            "or 'devices' and 'links' (everything listed)"
        )
    if "servers" in document.value:
        members = document.mapping(required=("schema_version", "servers"), optional=("links",))
    else:
        members = document.mapping(required=("schema_version", "devices"), optional=("links",))
    members["schema_version"].integer(minimum=SCHEMA_VERSION, maximum=SCHEMA_VERSION)
    if "servers" in members:
        devices, links = read_servers(members["servers"], members.get("links"))
    else:
        devices, links = _read_devices(members["devices"]), _read_links(members.get("links"))
    topology = document.build(ClusterTopology, devices=tuple(devices), links=tuple(links))
    document.build(check_reachable, topology=topology)
    return topology


def _read_devices(entry: Entry) -> list[Device]:
    devices: dict[int, Device] = {}
    for item in entry.items(of="devices"):
        members = item.mapping(required=_NEEDED_DEVICE_FIELDS, optional=("relative_speed",))
        device = item.build(
            Device,
            global_rank=members["global_rank"].integer(minimum=0),
            server=members["server"].text(),
            model=members["model"].text(),
            memory_bytes=members["memory_bytes"].integer(minimum=1),
            relative_speed=members["relative_speed"].number() if "relative_speed" in members else 1.0,
        )
        known = devices.get(device.global_rank)
        if known is not None:
            raise item.error(
                f"global_rank {device.global_rank} is given twice, on servers {known.server!r} and {device.server!r}; "
                "each device has a rank of its own, on one server"
            )
        devices[device.global_rank] = device
    missing = [rank for rank in range(len(devices)) if rank not in devices]
    if missing:
        raise entry.error(f"{len(devices)} devices have global ranks 0 to {len(devices) - 1}; {missing[0]} is missing")
    return [devices[rank] for rank in sorted(devices)]


def _read_links(entry: Entry | None) -> list[Link]:
    if entry is None or entry.value == []:
        return []
    links = []
    for item in entry.items(of="links"):
        members = item.mapping(required=_NEEDED_LINK_FIELDS, optional=("latency_s", "duplex", "sharing", "kind"))
        links.append(
            item.build(
                Link,
                a=members["a"].text(),
                b=members["b"].text(),
                bandwidth_bytes_per_s=members["bandwidth_bytes_per_s"].number(),
                latency_s=members["latency_s"].number() if "latency_s" in members else 0.0,
                duplex=members["duplex"].choice(DUPLEX_MODES) if "duplex" in members else "full",
                sharing=members["sharing"].choice(SHARING_MODES) if "sharing" in members else "fair",
                kind=members["kind"].text(allow_empty=True) if "kind" in members else "",
            )
        )
    return links
