"""The memory that a process group reads from and writes to."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.tensor_spec import SENT_AS_THEY_ARE, TensorSpec, as_bytes


class Wire(Protocol):
    """Gives the buffers of messages, of equal size at both ends, in memory that the process group can use."""

    def outgoing(self, tensor: Tensor) -> Tensor:
        """The tensor's numbers, ready to be sent; stays valid as long as it is referenced and the tensor unchanged."""
        ...

    def incoming(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """A buffer to receive in, and the new tensor it is meant for: of this spec, not yet requiring a gradient."""
        ...

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        """Bring a received buffer to its target."""
        ...


class DirectWire:
    """The tensors' own memory: gloo with CPU tensors, NCCL with CUDA tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> Tensor:
        if tensor.dtype in SENT_AS_THEY_ARE and tensor.is_contiguous() and not tensor.is_neg():
            # Making a view of bytes takes as long as starting to send it.
            return tensor.detach() if tensor.requires_grad else tensor
        return as_bytes(tensor)

    def incoming(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        target = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
        return target if spec.is_sent_as_it_is else as_bytes(target), target

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        pass


class HostWire:
    """Copies in host memory: gloo with CUDA tensors, which it cannot send.

    Pinned memory comes from torch's caching allocator, so that a steady state allocates nothing from the system.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def outgoing(self, tensor: Tensor) -> Tensor:
        data = as_bytes(tensor)
        buffer = self._empty(data.numel())
        buffer.copy_(data, non_blocking=True)
        if self._is_cuda:
            # gloo reads the buffer at once, without regard to streams.
            torch.cuda.current_stream(tensor.device).synchronize()
        return buffer

    def incoming(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        return self._empty(spec.num_bytes), spec.empty(self._device)

    def arrived(self, buffer: Tensor, target: Tensor) -> None:
        as_bytes(target).copy_(buffer, non_blocking=True)

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda)


def wire_for(device: torch.device, group: dist.ProcessGroup) -> Wire:
    """The wire between tensors on a device and a process group."""
    if device.type == "cpu" or dist.get_backend(group) != "gloo":
        return DirectWire(device)
    return HostWire(device)
