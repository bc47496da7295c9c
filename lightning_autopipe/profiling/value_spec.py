"""What is known of a value that crosses between two layers, and stand-ins for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSpec:
    """Geometry of a crossing value as its receiver gets it: memory dense, in the sender's order of dimensions."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> ValueSpec:
        """Describe a tensor."""
        with torch._C.DisableTorchFunction():
            stride = torch.empty_like(tensor, device="meta").stride()
            return cls(
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                stride=tuple(stride),
                requires_grad=tensor.requires_grad,
            )

    @property
    def num_bytes(self) -> int:
        """Size of the numbers."""
        num_elements = 1
        for size in self.shape:
            num_elements *= size
        return num_elements * self.dtype.itemsize

    def sample(self, device: torch.device) -> Tensor:
        """Give a stand-in, a leaf: normal random numbers.

        Whole numbers are 0, which is a valid index into everything that is not empty; truth values are true.
        """
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            if self.dtype.itemsize > 1:
                tensor.normal_()
            else:  # 8-bit floats cannot be drawn
                tensor.copy_(torch.randn(self.shape, device=device))
        else:
            tensor.fill_(self.dtype is torch.bool)
        return tensor.requires_grad_(self.requires_grad)

    def sample_gradient(self, device: torch.device) -> Tensor:
        """Give a random gradient for the value."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).normal_()
