"""Asks NVIDIA's management library for GPUs and what joins them. It is optional: ``pip install nvidia-ml-py``."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SAME_SWITCH, SAME_ROOT, SAME_SOCKET = 20, 30, 40
"""NVML's levels of the nearest common point of two devices: at most so much, it is a PCIe switch (or several in a row),
a root complex, a socket; above, they are on different sockets."""
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}
"""Per lane and direction by NVML's number of the version (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0)."""
_NEWEST_NVLINK_BYTES_PER_S = 50e9
_NVLINK_TO_SWITCH = 2
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.877e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; None where the driver does not tell."""

    name: str
    memory_bytes: int
    uuid: str
    bus_id: str
    """PCI address."""
    pcie_bytes_per_s: float | None
    """Of its own PCIe link, per direction, as printed on the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All GPUs of a host, in the driver's order."""

    gpus: tuple[Gpu, ...]
    levels: dict[tuple[int, int], int]
    """Of the nearest common point of each pair (i < j); pairs that the driver does not tell are left out."""
    nvlink_bytes_per_s: dict[tuple[int, int], float]
    """Of the direct links between a pair (i < j), all lanes together, per direction."""
    nvswitch_bytes_per_s: dict[int, float]
    """Of a GPU's links to switches, per direction."""


class NvmlUnavailableError(Exception):
    """There is no NVML here, or it cannot be used; says why."""


def load_nvml() -> Any:
    """The module ``pynvml``.

    Raises:
        NvmlUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailableError("nvidia-ml-py is not installed") from error


def read_gpus(nvml: Any) -> Gpus:
    """GPUs and the links between them.

    Args:
        nvml: The module ``pynvml``, or what has its functions.

    Raises:
        NvmlUnavailableError: there is no driver, or it refuses to name a GPU or its memory.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML does not start: {error}") from error
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(nvml, handle) for handle in handles)
        direct, switched = _nvlinks(nvml, handles, gpus)
        return Gpus(gpus=gpus, levels=_levels(nvml, handles), nvlink_bytes_per_s=direct, nvswitch_bytes_per_s=switched)
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML does not describe the GPUs: {error}") from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    generation = _told(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _told(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    pcie = None
    if generation and width:
        pcie = width * _PCIE_LANE_BYTES_PER_S.get(generation, _PCIE_LANE_BYTES_PER_S[6])
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        uuid=_text(_told(nvml, "nvmlDeviceGetUUID", handle) or "").removeprefix("GPU-"),
        bus_id=_bus_id(_told(nvml, "nvmlDeviceGetPciInfo", handle)),
        pcie_bytes_per_s=pcie,
    )


def _levels(nvml: Any, handles: list[Any]) -> dict[tuple[int, int], int]:
    levels = {}
    for i, j in _pairs(len(handles)):
        level = _told(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
        if level is not None:
            levels[i, j] = int(level)
    return levels


def _nvlinks(
    nvml: Any, handles: list[Any], gpus: tuple[Gpu, ...]
) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
    index_of_bus_id = {gpu.bus_id: index for index, gpu in enumerate(gpus) if gpu.bus_id}
    direct: Counter[tuple[int, int]] = Counter()
    switched: Counter[int] = Counter()
    lane_bytes_per_s: dict[int, float] = {}
    for index, handle in enumerate(handles):
        for lane in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            if not _told(nvml, "nvmlDeviceGetNvLinkState", handle, lane):
                continue
            version = _told(nvml, "nvmlDeviceGetNvLinkVersion", handle, lane)
            lane_bytes_per_s[index] = _NVLINK_BYTES_PER_S.get(version or 2, _NEWEST_NVLINK_BYTES_PER_S)
            remote = _told(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, lane)
            peer = index_of_bus_id.get(_bus_id(remote))
            if peer is not None:
                # Each lane is seen from both ends.
                direct[index, peer] += index < peer
            elif _told(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, lane) == _NVLINK_TO_SWITCH:
                switched[index] += 1
    return (
        {pair: lanes * lane_bytes_per_s[pair[0]] for pair, lanes in direct.items() if lanes},
        {index: lanes * lane_bytes_per_s[index] for index, lanes in switched.items()},
    )


def _told(nvml: Any, function: str, *args: Any) -> Any:
    """What the driver answers; None where it refuses (no permission, not supported) or the module is too old to ask."""
    try:
        return getattr(nvml, function)(*args)
    except (nvml.NVMLError, AttributeError):
        return None


def _bus_id(pci_info: Any) -> str:
    return "" if pci_info is None else _text(pci_info.busId).lower()


def _text(value: bytes | str) -> str:
    # Older versions of the module give bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _pairs(number: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(number) for j in range(i + 1, number))
