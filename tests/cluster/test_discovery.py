"""Discovery with a driver and a /sys that are made up; no GPU is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autopipe.cluster import HostDescription, RankPlace, describe_host, join_hosts, local_topology
from lightning_autopipe.cluster.nvml import NvmlUnavailableError, load_nvml
from lightning_autopipe.core import ConfigurationError
from lightning_autopipe.planner.links import LinkNetwork

GIB = 1 << 30


class FakeNvml:
    """The functions of ``pynvml`` for eight GPUs on two PCIe switches, one a socket, with NVLink between pairs."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, *, refused: tuple[str, ...] = (), gpus_per_switch: int = 4, num_gpus: int = 8) -> None:
        self.refused = refused
        self.num_gpus = num_gpus
        self.gpus_per_switch = gpus_per_switch
        self.is_open = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.refused:
            return self._refuse
        return super().__getattribute__(name)

    def _refuse(self, *args: Any) -> None:
        raise self.NVMLError("Insufficient Permissions")

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA GeForce RTX 3090"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=24 * GIB)

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000000{handle // 4}:{0x1A + handle:02X}:00.0".encode())

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:  # noqa: N802
        if a // self.gpus_per_switch == b // self.gpus_per_switch:
            return 10
        return 30 if a // 4 == b // 4 else 50

    def nvmlDeviceGetNvLinkState(self, handle: int, lane: int) -> int:  # noqa: N802
        return int(lane < 2)

    def nvmlDeviceGetNvLinkVersion(self, handle: int, lane: int) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, lane: int) -> Any:  # noqa: N802
        return self.nvmlDeviceGetPciInfo(handle ^ 1)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, lane: int) -> int:  # noqa: N802
        return 0


class SwitchedNvml(FakeNvml):
    """All NVLink lanes lead to NVSwitches."""

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, lane: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId="00000000:C4:00.0")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, lane: int) -> int:  # noqa: N802
        return 2


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def interface(name: str, *, speed: str, state: str = "up", numa_node: str = "0") -> dict[str, str]:
    folder = f"class/net/{name}"
    return {f"{folder}/speed": speed, f"{folder}/operstate": state, f"{folder}/device/numa_node": numa_node}


def infiniband(
    name: str, *, rate: str = "100 Gb/sec (4X EDR)", state: str = "4: ACTIVE", numa_node: str = "0"
) -> dict[str, str]:
    port = f"class/infiniband/{name}/ports/1"
    return {
        f"{port}/rate": rate,
        f"{port}/state": state,
        f"{port}/link_layer": "InfiniBand",
        f"class/infiniband/{name}/device/numa_node": numa_node,
    }


def gpus_on_sockets(numa_node_of: Callable[[int], int]) -> dict[str, str]:
    return {
        f"bus/pci/devices/000{index // 4}:{0x1A + index:02x}:00.0/numa_node": str(numa_node_of(index))
        for index in range(8)
    }


PROC = {
    "cpuinfo": "processor\t: 0\nmodel name\t: Some  CPU @ 2.00GHz\nprocessor\t: 1\nmodel name\t: Some CPU",
    "meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB",
    "sys/kernel/random/boot_id": "boot-1",
}


@pytest.fixture
def describe(tmp_path: Path) -> Callable[..., HostDescription]:
    def describe_made_up(
        nvml: FakeNvml | None, files: dict[str, str], *, name: str = "host", proc: dict[str, str] | None = None
    ) -> HostDescription:
        def load() -> Any:
            if nvml is None:
                raise NvmlUnavailableError("nvidia-ml-py is not installed")
            return nvml

        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return describe_host(
            load=load,
            sysfs=write(folder / "sys", files),
            procfs=write(folder / "proc", PROC if proc is None else proc),
            name=name,
        )

    return describe_made_up


def bandwidths(host: HostDescription, kind: str) -> dict[tuple[str, str], float]:
    return {(link.a, link.b): link.bandwidth_bytes_per_s for link in host.links if link.kind == kind}


def test_eight_gpus_on_two_switches_with_nvlink_pairs(describe: Callable[..., HostDescription]) -> None:
    nvml = FakeNvml()
    host = describe(nvml, {**gpus_on_sockets(lambda index: index // 4), **infiniband("mlx5_0", numa_node="1")})
    assert not nvml.is_open
    assert [(device.model, device.memory_bytes) for device in host.devices] == [
        ("NVIDIA GeForce RTX 3090", 24 * GIB)
    ] * 8
    pcie = bandwidths(host, "PCIe")
    assert list(pcie) == [
        *((f"device {index}", "switch 0") for index in range(4)),
        ("switch 0", "socket 0"),
        *((f"device {index}", "switch 1") for index in range(4, 8)),
        ("switch 1", "socket 1"),
    ]
    assert pcie["device 0", "switch 0"] == pytest.approx(0.8 * 16 * 1.969e9)
    # Two lanes of 25 GB/s, of which transfers reach 85 %.
    pairs = {(f"device {index}", f"device {index + 1}"): pytest.approx(42.5e9) for index in (0, 2, 4, 6)}
    assert bandwidths(host, "NVLink") == pairs
    assert list(bandwidths(host, "sockets")) == [("socket 0", "socket 1")]
    assert bandwidths(host, "InfiniBand") == {("socket 1", "network"): pytest.approx(0.9 * 12.5e9)}
    assert host.notes == ("between sockets 20 GB/s are assumed",)
    network = LinkNetwork(local_topology(host))
    assert len(network.route(0, 1).channels) == 1
    assert len(network.route(0, 2).channels) == 2
    assert len(network.route(1, 6).channels) == 5


def test_gpus_without_switches_hang_on_their_sockets(describe: Callable[..., HostDescription]) -> None:
    host = describe(FakeNvml(gpus_per_switch=1), gpus_on_sockets(lambda index: index // 4))
    assert list(bandwidths(host, "PCIe")) == [(f"device {index}", f"socket {index // 4}") for index in range(8)]


def test_without_numa_nodes_the_driver_tells_sockets(describe: Callable[..., HostDescription]) -> None:
    for files in ({}, gpus_on_sockets(lambda index: -1)):
        host = describe(FakeNvml(gpus_per_switch=1), files)
        assert [end for _, end in bandwidths(host, "PCIe")] == ["socket 0"] * 4 + ["socket 1"] * 4


def test_nvswitch(describe: Callable[..., HostDescription]) -> None:
    host = describe(SwitchedNvml(), {})
    assert bandwidths(host, "NVLink") == {(f"device {index}", "nvswitch"): pytest.approx(42.5e9) for index in range(8)}
    assert LinkNetwork(local_topology(host)).route(0, 7).bandwidth_bytes_per_s == pytest.approx(42.5e9)


def test_what_the_driver_refuses_is_assumed_or_left_out(describe: Callable[..., HostDescription]) -> None:
    refused = (
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNvLinkState",
    )
    host = describe(FakeNvml(refused=refused), {})
    assert bandwidths(host, "NVLink") == {}
    assert set(bandwidths(host, "PCIe")) == {(f"device {index}", "socket 0") for index in range(8)}
    assert "device 0: its PCIe link is assumed to be 3.0 x16" in host.notes
    assert local_topology(host).world_size == 8


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_does_not_describe_gpus_leaves_the_cpu(
    describe: Callable[..., HostDescription], function: str
) -> None:
    host = describe(FakeNvml(refused=(function,)), {})
    assert [(device.model, device.memory_bytes) for device in host.devices] == [("Some CPU @ 2.00GHz", 16 * GIB)]
    assert host.notes[0].startswith("no GPUs: NVML does not")
    assert "Insufficient Permissions" in host.notes[0]


def test_no_nvml_no_gpus_no_proc(describe: Callable[..., HostDescription], monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(None, {}).notes[0] == "no GPUs: nvidia-ml-py is not installed"
    assert describe(FakeNvml(num_gpus=0), {}).notes[0] == "no GPUs: the driver knows of none"
    bare = describe(None, {}, proc={})
    assert bare.devices[0].model == "CPU"
    assert bare.devices[0].memory_bytes > 0
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(NvmlUnavailableError, match="not installed"):
        load_nvml()


def test_network_interfaces(describe: Callable[..., HostDescription]) -> None:
    def way_out(files: dict[str, str]) -> tuple[dict[tuple[str, str], float], tuple[str, ...]]:
        host = describe(None, files)
        return {
            (link.kind, link.a): link.bandwidth_bytes_per_s for link in host.links if link.b == "network"
        }, host.notes[1:]

    slow, fast, down = (
        interface("eth0", speed="1000"),
        interface("eth1", speed="25000"),
        interface("eth2", speed="100000", state="down"),
    )
    virtual = {"class/net/docker0/speed": "400000", "class/net/docker0/operstate": "up"}
    found, notes = way_out({**slow, **fast, **down, **virtual})
    assert (found, notes) == ({("Ethernet", "socket 0"): pytest.approx(0.9 * 25e9 / 8)}, ())
    found, notes = way_out(interface("eth0", speed="-1"))
    assert found == {("Ethernet", "socket 0"): pytest.approx(0.9 * 1.25e9)}
    assert notes == ("interface eth0 does not tell its speed: 10 Gb/s are assumed",)
    found, notes = way_out(down)
    assert found == {("assumed", "socket 0"): 1.25e9}
    assert notes == ("no network interface that is up: 10 Gb/s are assumed",)
    found, _ = way_out({**fast, **infiniband("mlx5_0"), **infiniband("mlx5_1", state="1: DOWN", rate="400 Gb/sec")})
    assert found == {("InfiniBand", "socket 0"): pytest.approx(0.9 * 12.5e9)}


def test_files_that_may_not_be_read_are_as_if_they_were_not_there(
    describe: Callable[..., HostDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_text

    def refuse(self: Path, *args: Any, **options: Any) -> str:
        if self.name in ("speed", "numa_node", "boot_id"):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    host = describe(FakeNvml(), {**gpus_on_sockets(lambda index: index // 4), **interface("eth0", speed="1000")})
    assert "interface eth0 does not tell its speed: 10 Gb/s are assumed" in host.notes
    assert len(local_topology(host).links) > 8


def test_hosts_become_one_topology_in_the_launchers_order(describe: Callable[..., HostDescription]) -> None:
    gpu_host = describe(
        FakeNvml(), {**gpus_on_sockets(lambda index: index // 4), **interface("eth0", speed="25000")}, name="g"
    )
    cpu_host = describe(None, interface("eth0", speed="10000"), name="c")
    # As SLURM's cyclic distribution gives them: ranks take turns between hosts.
    places = [
        RankPlace(host=gpu_host, device_index=5),
        RankPlace(host=cpu_host),
        RankPlace(host=gpu_host, device_index=1),
    ]
    cluster = join_hosts(places)
    assert [device.server for device in cluster.devices] == ["g", "c", "g"]
    assert {point for link in cluster.links for point in (link.a, link.b)} == {
        "rank 0", "rank 1", "rank 2", "g/switch 0", "g/switch 1", "g/socket 0", "g/socket 1", "c/socket 0", "network",
    }  # fmt: skip
    network = LinkNetwork(cluster)
    assert network.route(0, 1).bandwidth_bytes_per_s == pytest.approx(0.9 * 1.25e9)
    assert len(network.route(0, 2).channels) == 5


def test_ranks_that_share_a_device_share_memory_and_speed(describe: Callable[..., HostDescription]) -> None:
    host = describe(FakeNvml(), {})
    cluster = join_hosts([RankPlace(host=host, device_index=index) for index in (0, 0, 1)])
    assert [device.memory_bytes for device in cluster.devices] == [12 * GIB, 12 * GIB, 24 * GIB]
    assert [device.relative_speed for device in cluster.devices] == [0.5, 0.5, 1.0]
    assert sum(link.kind == "NVLink" for link in cluster.links) == 2
    alike = join_hosts([RankPlace(host=host, device_index=0)] * 2)
    assert [device.relative_speed for device in alike.devices] == [1.0, 1.0]


def test_hosts_of_one_name_are_told_apart_by_their_boot(describe: Callable[..., HostDescription]) -> None:
    first, again = describe(None, {}), describe(None, {})
    other = describe(None, {}, proc={**PROC, "sys/kernel/random/boot_id": "boot-2"})
    cluster = join_hosts([RankPlace(host=host) for host in (first, other, again)])
    assert [device.server for device in cluster.devices] == ["host-0", "host-1", "host-0"]


def test_wrong_places_are_refused(describe: Callable[..., HostDescription]) -> None:
    host = describe(FakeNvml(), {})
    assert host.device_index("GPU-3") == host.device_index("3") == 3
    with pytest.raises(ConfigurationError, match=r"host 'host' has no device with UUID '9'; it has \['0', '1'"):
        host.device_index("9")
    with pytest.raises(
        ConfigurationError, match="rank 1 says that it has device 8 of host 'host', which has 8: 0 to 7"
    ):
        join_hosts([RankPlace(host=host), RankPlace(host=host, device_index=8)])
    with pytest.raises(ConfigurationError, match="at least one device"):
        join_hosts([])
