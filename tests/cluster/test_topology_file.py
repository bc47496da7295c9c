from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.cluster import (
    SERVER_KINDS,
    example_names,
    find_cluster_file,
    load_topology,
    save_topology,
    synthetic_cluster,
    topology_from_text,
)
from lightning_autopipe.core import ClusterTopology, ConfigurationError, Device, Link
from lightning_autopipe.planner.links import LinkNetwork

TWO_SERVERS = """
schema_version: 1
servers:
  - name: node
    count: 2
    devices:
      - {count: 3, model: RTX 3090, memory: 24 GB, speed: 0.5}
      - {model: V100, memory: 32 GiB}
    links:
      - {between: [device 0-3, socket 0], kind: PCIe, bandwidth: 12 GB/s, latency: 5 us}
      - {between: [device 0-2, device 0-2], kind: NVLink, bandwidth: 48 GB/s}
    network: {at: socket 0, bandwidth: 100 Gb/s, latency: 2 us, duplex: half, sharing: fifo}
"""


def load(text: str) -> ClusterTopology:
    return topology_from_text(text, source="c.yaml")


def test_templates_and_counts_become_devices_and_links() -> None:
    cluster = load(TWO_SERVERS)
    assert cluster.servers == ("node-0", "node-1")
    assert [device.model for device in cluster.devices] == ["RTX 3090", "RTX 3090", "RTX 3090", "V100"] * 2
    assert cluster.devices[0].memory_bytes == 24 * 10**9
    assert cluster.devices[7] == Device(
        global_rank=7, server="node-1", model="V100", memory_bytes=32 << 30, relative_speed=1.0
    )
    second = cluster.links[8:]
    assert second[0] == Link(a="rank 4", b="node-1/socket 0", bandwidth_bytes_per_s=12e9, latency_s=5e-6, kind="PCIe")
    assert {(link.a, link.b) for link in second if link.kind == "NVLink"} == {
        ("rank 4", "rank 5"),
        ("rank 4", "rank 6"),
        ("rank 5", "rank 6"),
    }
    assert second[-1] == Link(
        a="node-1/socket 0",
        b="network",
        bandwidth_bytes_per_s=12.5e9,
        latency_s=2e-6,
        duplex="half",
        sharing="fifo",
    )


def test_racks_and_several_network_cards() -> None:
    cluster = load(
        "schema_version: 1\n"
        "servers:\n"
        "  - {name: a, devices: [{model: x, memory: 1 GB}], network: {to: rack, bandwidth: 1 GB/s}}\n"
        "  - {name: b, devices: [{model: x, memory: 1 GB}],\n"
        "     network: [{bandwidth: 1 GB/s}, {bandwidth: 2 GB/s}]}\n"
        "links: [{between: [rack, network], bandwidth: 4 GB/s}]\n"
    )
    assert [(link.a, link.b) for link in cluster.links] == [
        ("a", "rack"),
        ("b", "network"),
        ("b", "network"),
        ("rack", "network"),
    ]
    assert LinkNetwork(cluster).route(0, 1).bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize("name", example_names())
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_examples_load_and_come_back_equal(name: str, suffix: str, tmp_path: Path) -> None:
    cluster = load_topology(find_cluster_file(name))
    network = LinkNetwork(cluster)
    assert all(network.route(0, rank).channels for rank in range(1, cluster.world_size))
    path = tmp_path / f"saved.{suffix}"
    save_topology(cluster, path)
    assert load_topology(path) == cluster
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_examples_are_what_they_are_named_for() -> None:
    assert example_names() == (
        "no_peer_access_4",
        "nvlink_2x8",
        "rtx3090_v100",
        "rtx4090_8",
        "slow_network",
        "uneven_1_2_1",
    )
    mixed = load_topology(find_cluster_file("rtx3090_v100"))
    assert [device.model for device in mixed.devices] == ["RTX 3090"] * 8 + ["V100"] * 4
    assert [link.bandwidth_bytes_per_s for link in mixed.links if link.b == "network"] == [100e9 / 8, 25e9 / 8]
    assert LinkNetwork(load_topology(find_cluster_file("slow_network"))).route(0, 2).bandwidth_bytes_per_s == 25e6
    uneven = load_topology(find_cluster_file("uneven_1_2_1"))
    assert [len(uneven.server_ranks(server)) for server in uneven.servers] == [1, 2, 1]
    ada = LinkNetwork(load_topology(find_cluster_file("rtx4090_8")))
    assert [ada.route(0, rank).bandwidth_bytes_per_s for rank in (1, 5)] == [25e9, 20.5e9]
    measured = LinkNetwork(load_topology(find_cluster_file("nvlink_2x8")))
    assert [measured.route(0, rank).bandwidth_bytes_per_s for rank in (1, 8)] == [149.67e9, 8.21e9]


WRONG = [
    # text to replace, its replacement, what the error says (file and line first)
    (
        "memory: 24 GB",
        "memory: 24 Gb",
        r"^c.yaml:7: servers\[0\].devices\[0\].memory: '24 Gb': unit 'Gb' is none of a ",
    ),
    ("memory: 24 GB", "memory: 24", r"memory: 24 has no unit; write a number and a unit: '24 GiB' or '24 GB'"),
    ("memory: 24 GB", "memory: -24 GB", r"'-24 GB': a memory size is finite and > 0"),
    ("memory: 24 GB", "memory: big", r"'big' is no memory size"),
    ("memory: 24 GB, ", "", r"^c.yaml:7: servers\[0\].devices\[0\]: memory missing; needed are model, memory"),
    ("model: V100", "model: 100", r"devices\[1\].model: expected a text, got 100; put it in quotes"),
    ("speed: 0.5", "speed: -1", r"devices\[0\]: Device 0: relative_speed must be a finite number > 0, got -1"),
    ("speed: 0.5", "speed: fast", r"speed: expected a number, got 'fast'"),
    ("count: 3", "count: 0", r"count: expected an integer from 1 to 16384, got 0"),
    ("count: 3", "count: true", r"count: expected an integer from 1 to 16384, got True"),
    ("count: 2", "count: 16384", "more than 16384 devices"),
    (
        "bandwidth: 100 Gb/s",
        "bandwidth: 100 GB",
        r"^c.yaml:12: servers\[0\].network.bandwidth: '100 GB': unit 'GB' is no",
    ),
    ("bandwidth: 100 Gb/s", "bandwidth: 0 Gb/s", "'0 Gb/s': a bandwidth is finite and > 0"),
    ("bandwidth: 100 Gb/s, ", "", "bandwidth missing"),
    ("latency: 2 us", "latency: -2 us", "'-2 us': a time is finite and >= 0"),
    ("latency: 2 us", "latency: 2 min", "unit 'min' is none of a time"),
    ("duplex: half", "duplex: both", r"network.duplex: expected one of full, half, got 'both'"),
    ("sharing: fifo", "sharing: lifo", "expected one of fair, fifo, got 'lifo'"),
    ("sharing: fifo", "shared: fifo", r"network.shared: unknown; allowed are bandwidth, at, to, latency, "),
    ("name: node", "name: a/b", "'a/b' cannot be a server's name"),
    ("name: node", "name: rank 3", "cannot be a server's name"),
    ("device 0-3", "device 0-4", r"between\[0\]: 'device 0-4': server 'node-0' has 4 devices: 0 to 3"),
    ("device 0-3", "device 3-0", "has 4 devices: 0 to 3"),
    ("device 0-3", "devices", "devices are called 'device 0', several 'device 0-3'"),
    ("device 0-3", "node-1/socket 0", "is no point inside a server"),
    ("[device 0-3, socket 0]", "[device 0-3]", "a link joins two points, got 1"),
    ("[device 0-2, device 0-2]", "[device 1, device 1]", "both ends are the same point"),
    ("at: socket 0", "at: sokcet 0", "leads nowhere: no device is at 'node-0/sokcet 0', and no other link"),
    ("device 0-3, socket 0", "device 0-2, socket 0", "no links lead from rank 0 .* to rank 3 .*at 'node-0'"),
    ("schema_version: 1", "schema_version: 2", "schema_version: expected an integer from 1 to 1, got 2"),
    ("schema_version: 1\n", "", "this is no cluster file: it begins with 'schema_version: 1'"),
    ("servers:", "servres:", "servres: unknown; allowed are schema_version, devices, links"),
    ("count: 2\n", "count: 2\n    name: other\n", "^c.yaml:6: not YAML: the key 'name' is given twice"),
    ("count: 2", "count: 2: 3", "^c.yaml:5: not YAML"),
    ("count: 2", "\tcount: 2", "not YAML"),
    ("count: 2", "count: !!python/object/apply:os.getcwd []", "not YAML: could not determine a constructor"),
    ("count: 2", "1: 2", "the key '1' is no text"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_wrong_file_is_refused_with_its_place(old: str, new: str, message: str) -> None:
    assert old in TWO_SERVERS
    with pytest.raises(ConfigurationError, match=message):
        load(TWO_SERVERS.replace(old, new, 1))


LISTED = """
schema_version: 1
devices:
  - {global_rank: 1, server: a, model: x, memory_bytes: 10}
  - {global_rank: 0, server: a, model: x, memory_bytes: 10}
links:
  - {a: rank 0, b: rank 1, bandwidth_bytes_per_s: 1e9}
"""


def test_listed_devices_may_come_in_any_order() -> None:
    cluster = load(LISTED)
    assert [device.global_rank for device in cluster.devices] == [0, 1]
    assert cluster.links[0].bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "global_rank: 1, server: a",
            "global_rank: 0, server: b",
            r"given twice, on servers 'b' and 'a'.*on one server",
        ),
        ("global_rank: 1", "global_rank: 2", r"devices: 2 devices have global ranks 0 to 1; 1 is missing"),
        ("memory_bytes: 10", "memory_bytes: 10 GB", "memory_bytes: expected an integer >= 1, got '10 GB'"),
        ("b: rank 1", "b: rank 7", "links\\[0\\] leads to 'rank 7', but there are 2 devices"),
        ("b: rank 1", "b: nowhere", "no device is at 'nowhere'"),
        (
            "1e9",
            "-5",
            r"^c.yaml:7: links\[0\]: Link rank 0 - rank 1: bandwidth_bytes_per_s must be a finite number > 0",
        ),
        ("1e9", ".nan", "must be a finite number"),
        ("1e9", "1 GB/s", "bandwidth_bytes_per_s: expected a number, got '1 GB/s'"),
    ],
)
def test_a_wrong_list_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(LISTED.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.yaml", b"\xff\xfe\x00", "not a text file: byte 0 is no UTF-8"),
        ("c.yaml", b"", "this is no cluster file"),
        ("c.yaml", b"[" * 100_000, "nested too deeply|not YAML"),
        ("c.yaml", b"schema_version: 1\nservers: [{name: a, dev", "c.yaml:3: not YAML"),
        ("c.json", b'{"schema_version": 1', "c.json: not JSON: .*line 1"),
        ("c.json", b'{"schema_version": 1, "schema_version": 1}', "a key is given twice"),
        ("c.json", b"[]", "this is no cluster file"),
    ],
)
def test_a_damaged_file_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        load_topology(tmp_path / name)


def test_files_that_are_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"missing\.yaml: cannot be read: No such file"):
        load_topology("missing.yaml")
    with pytest.raises(ConfigurationError, match="no such file, and no example; examples are no_peer_access_4,"):
        find_cluster_file("nothing")
    with pytest.raises(ConfigurationError, match="cannot be written: "):
        save_topology(load(LISTED), f"{__file__}/c.yaml")


names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)


def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    devices = tuple(
        Device(global_rank=rank, server="1e9", model=model, memory_bytes=1) for rank, model in enumerate(("0E0", "3"))
    )
    save_topology(ClusterTopology(devices=devices), tmp_path / "c.yaml")
    assert load_topology(tmp_path / "c.yaml").devices == devices


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_saved_comes_back_equal(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    number = data.draw(st.integers(1, 5))
    positive = st.floats(1e-9, 1e15)
    devices = tuple(
        Device(
            global_rank=rank,
            server=data.draw(names),
            model=data.draw(names),
            memory_bytes=data.draw(st.integers(1, 2**60)),
            relative_speed=data.draw(positive),
        )
        for rank in range(number)
    )
    links = tuple(
        Link(
            a=f"rank {rank}",
            b="hub",
            bandwidth_bytes_per_s=data.draw(positive),
            latency_s=data.draw(st.floats(0, 10)),
            duplex=data.draw(st.sampled_from(("full", "half"))),
            sharing=data.draw(st.sampled_from(("fair", "fifo"))),
            kind=data.draw(st.one_of(st.just(""), names)),
        )
        for rank in range(number)
        if number > 1
    )
    cluster = ClusterTopology(devices=devices, links=links)
    path = tmp_path_factory.mktemp("clusters") / data.draw(st.sampled_from(("c.yaml", "c.json")))
    save_topology(cluster, path)
    assert load_topology(path) == cluster


def test_synthetic_clusters_are_unlike_and_repeatable(tmp_path: Path) -> None:
    cluster = synthetic_cluster(128, devices_per_server=8, seed=3)
    assert (cluster.world_size, len(cluster.servers)) == (1024, 128)
    assert (
        cluster == synthetic_cluster(128, devices_per_server=8, seed=3) != synthetic_cluster(128, devices_per_server=8)
    )
    assert {device.model for device in cluster.devices} == {kind.model for kind in SERVER_KINDS}
    save_topology(cluster, tmp_path / "c.yaml")
    assert load_topology(tmp_path / "c.yaml") == cluster
    own_numbers = synthetic_cluster(5)
    assert sorted(len(own_numbers.server_ranks(name)) for name in own_numbers.servers) == [4, 4, 8, 8, 8]
    with pytest.raises(ConfigurationError, match="num_servers must be an integer >= 1"):
        synthetic_cluster(0)
