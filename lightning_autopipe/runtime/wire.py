"""The memory that a process group reads from and writes to."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.tensor_spec import as_bytes


class Wire(Protocol):
    """Gives the buffers of messages; all are uint8[num_bytes] in memory that the process group can use."""

    def outgoing(self, tensor: Tensor) -> Tensor:
        """The tensor's bytes, ready to be sent; stays valid as long as it is referenced and the tensor unchanged."""
        ...

    def incoming(self, target: Tensor) -> Tensor:
        """A buffer to receive the bytes of `target` (dense memory) in."""
        ...

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        """Bring a received buffer to its target."""
        ...


class DirectWire:
    """The tensors' own memory: gloo with CPU tensors, NCCL with CUDA tensors."""

    def outgoing(self, tensor: Tensor) -> Tensor:
        return as_bytes(tensor)

    def incoming(self, target: Tensor) -> Tensor:
        return as_bytes(target)

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        pass


class HostWire:
    """Copies in host memory: gloo with CUDA tensors, which it cannot send.

    Pinned memory comes from torch's caching allocator, so that a steady state allocates nothing from the system.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def outgoing(self, tensor: Tensor) -> Tensor:
        data = as_bytes(tensor)
        buffer = self._empty(data)
        buffer.copy_(data, non_blocking=True)
        if self._is_cuda:
            # gloo reads the buffer at once, without regard to streams.
            torch.cuda.current_stream(tensor.device).synchronize()
        return buffer

    def incoming(self, target: Tensor) -> Tensor:
        return self._empty(target)

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        as_bytes(target).copy_(buffer, non_blocking=True)

    def _empty(self, like: Tensor) -> Tensor:
        num_bytes = like.numel() * like.element_size()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda)


def wire_for(device: torch.device, group: dist.ProcessGroup) -> Wire:
    """The wire between tensors on a device and a process group."""
    if device.type == "cpu" or dist.get_backend(group) != "gloo":
        return DirectWire()
    return HostWire(device)
