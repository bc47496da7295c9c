"""Tensors whose values lie in a file that the process has mapped, and are read when they are used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from lightning_autopipe.capture.absent import is_absent

T = TypeVar("T", bound=Tensor)

_MAPS = Path("/proc/self/maps")


def in_mapped_files(tensors: Iterable[T]) -> list[T]:
    """Those of the tensors that lie in a mapped file; none where the system (not Linux) does not tell."""
    here = [tensor for tensor in tensors if not is_absent(tensor) and tensor.device.type == "cpu"]
    if not here or not _MAPS.exists():
        return []
    ranges = sorted(_file_ranges(_MAPS.read_text()))
    begins = [begin for begin, _ in ranges]

    def is_mapped(address: int) -> bool:
        position = bisect_right(begins, address) - 1
        return position >= 0 and address < ranges[position][1]

    return [tensor for tensor in here if is_mapped(tensor.data_ptr())]


def _file_ranges(maps: str) -> Iterable[tuple[int, int]]:
    """The addresses of mapped files, of lines ``begin-end permissions offset device inode path``."""
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0" and permissions.endswith("p"):  # private, not memory that processes share
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)
