from __future__ import annotations

import io
from textwrap import dedent

from rich.console import Console, RenderableType

from lightning_autopipe.cluster import find_cluster_file, load_topology, synthetic_cluster
from lightning_autopipe.core import ClusterTopology, Device, Link
from lightning_autopipe.visualization.cluster_tables import device_table, link_table, server_table, topology_tree


def text(item: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=120, color_system=None).print(item)
    return "\n".join(line.strip() for line in file.getvalue().strip().splitlines())


def lines(expected: str) -> str:
    return "\n".join(line.strip() for line in dedent(expected).strip().splitlines())


def test_servers() -> None:
    assert text(server_table(load_topology(find_cluster_file("rtx3090_v100")))) == lines(
        """
        12 devices in 2 servers

        server  ranks  devices       memory  speed  to others
        ──────────────────────────────────────────────────────────────────────
        rtx     0–7    8 × RTX 3090  192 GB      8  InfiniBand 12.5 GB/s 2 µs
        volta   8–11   4 × V100      128 GB    4.4  Ethernet 3.12 GB/s 15 µs
        """
    )


def test_ranks_that_are_alike_share_a_row() -> None:
    devices = tuple(
        Device(global_rank=rank, server="a" if rank != 2 else "[b]", model="x", memory_bytes=1 << 30)
        for rank in range(4)
    )
    assert text(device_table(ClusterTopology(devices=devices))) == lines(
        """
        devices

        ranks  server  model  memory  speed
        ────────────────────────────────────
        0–1    a       x       1 GiB      1
        2      [b]     x       1 GiB      1
        3      a       x       1 GiB      1
        """
    )


def test_links_that_are_alike_share_a_row() -> None:
    assert text(link_table(load_topology(find_cluster_file("rtx4090_8")))) == lines(
        """
        links

        from          to            kind  bandwidth  latency  duplex  sharing
        ──────────────────────────────────────────────────────────────────────
        rank 0–3      ada/socket 0  PCIe    25 GB/s     7 µs  full    fair
        rank 4–7      ada/socket 1  PCIe    25 GB/s     7 µs  full    fair
        ada/socket 0  ada/socket 1  UPI   20.5 GB/s     1 µs  full    fair
        """
    )


def test_the_tree_ends_at_devices_and_lists_the_rest() -> None:
    expected = """
        cluster
        ├── network
        │   ├── a/socket · fast 12.5 GB/s half duplex
        │   │   └── rank 0–1: x · PCIe 1 GB/s 5 µs
        │   └── b: x, rank 2 · slow 25 MB/s fifo
        └── and beside these
        └── rank 0 ↔ rank 1 · NVLink 50 GB/s
    """
    devices = tuple(Device(global_rank=rank, server="aab"[rank], model="x", memory_bytes=1) for rank in range(3))
    links = (
        *(
            Link(a=f"rank {rank}", b="a/socket", bandwidth_bytes_per_s=1e9, latency_s=5e-6, kind="PCIe")
            for rank in (0, 1)
        ),
        Link(a="rank 0", b="rank 1", bandwidth_bytes_per_s=50e9, kind="NVLink"),
        Link(a="a/socket", b="network", bandwidth_bytes_per_s=12.5e9, kind="fast", duplex="half"),
        Link(a="b", b="network", bandwidth_bytes_per_s=25e6, kind="slow", sharing="fifo"),
    )
    assert text(topology_tree(ClusterTopology(devices=devices, links=links))) == lines(expected)
    assert text(topology_tree(ClusterTopology(devices=devices[:2]))) == "cluster\n└── a: x, rank 0–1"


def test_long_tables_are_cut() -> None:
    cluster = synthetic_cluster(64)
    assert "24 more rows" in text(server_table(cluster))
    assert "more rows" not in text(server_table(cluster, max_rows=64))
    for table in (device_table, link_table):
        assert "more rows" in text(table(cluster))
