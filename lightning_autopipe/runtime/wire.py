"""The memory that a process group reads from and writes to."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.tensor_spec import as_bytes

_SENT_AS_THEY_ARE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""What every process group can send; the rest crosses as bytes."""


class Wire(Protocol):
    """Gives the buffers of messages, of equal size at both ends, in memory that the process group can use."""

    def outgoing(self, tensor: Tensor) -> Tensor:
        """The tensor's numbers, ready to be sent; stays valid as long as it is referenced and the tensor unchanged."""
        ...

    def incoming(self, target: Tensor) -> Tensor:
        """A buffer to receive the numbers of `target` in, which is dense and requires no gradient yet."""
        ...

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        """Bring a received buffer to its target."""
        ...


class DirectWire:
    """The tensors' own memory: gloo with CPU tensors, NCCL with CUDA tensors."""

    def outgoing(self, tensor: Tensor) -> Tensor:
        if tensor.dtype in _SENT_AS_THEY_ARE and tensor.is_contiguous() and not tensor.is_neg():
            # Making a view of bytes takes as long as starting to send it.
            return tensor.detach() if tensor.requires_grad else tensor
        return as_bytes(tensor)

    def incoming(self, target: Tensor) -> Tensor:
        if target.dtype in _SENT_AS_THEY_ARE and target.is_contiguous():
            return target
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
