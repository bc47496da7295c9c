"""What a receiver must know of a tensor before it arrives."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lightning_autopipe.runtime.errors import PipelineRuntimeError

SENT_AS_THEY_ARE = frozenset(
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
_PLAIN_TYPES = (Tensor, nn.Parameter)
_STRIDED = torch.strided


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Everything about a tensor but its numbers, as the receiver will see it.

    `stride` is the tensor's own where its memory is dense (whatever the order of its dimensions), else that of its
    packed copy, as `Tensor.clone` gives it: gaps and repeated elements do not cross.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Size of the numbers."""
    is_sent_as_it_is: bool = field(init=False, repr=False, compare=False)
    """Whether process groups can write to a tensor like this; else to its bytes."""

    def __post_init__(self) -> None:
        # Here and not in properties: both are asked for each message.
        object.__setattr__(self, "num_bytes", math.prod(self.shape) * self.dtype.itemsize)
        is_plain = self.dtype in SENT_AS_THEY_ARE and _is_contiguous(self.shape, self.stride)
        object.__setattr__(self, "is_sent_as_it_is", is_plain)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor.

        Raises:
            PipelineRuntimeError: The tensor has no plain memory to send (sparse, nested, meta, wrapper subclass).
        """
        _check_can_cross(tensor)
        return cls(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=_packed_stride(tensor),
            requires_grad=tensor.requires_grad,
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether this is the spec of a tensor; where its memory is dense without making one."""
        if (
            type(tensor) in _PLAIN_TYPES
            and tensor.layout is _STRIDED
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and tensor.stride() == self.stride
            and tensor.shape == self.shape
            and not tensor.is_meta
        ):
            return True
        return TensorSpec.of(tensor) == self

    def empty(self, device: torch.device) -> Tensor:
        """A new tensor of this spec with undefined numbers, not yet requiring a gradient."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        gradient = "requires_grad" if self.requires_grad else "no grad"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} stride {list(self.stride)} {gradient}"


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's numbers as uint8[num_bytes]: a view where its memory is dense, else of a packed copy."""
    data = tensor.detach().resolve_conj().resolve_neg()
    if _packed_stride(data) != data.stride():
        data = data.clone()
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def encode_specs(specs: Sequence[TensorSpec]) -> bytes:
    """Specs as bytes for a message header."""
    rows = [[str(spec.dtype).removeprefix("torch."), spec.shape, spec.stride, spec.requires_grad] for spec in specs]
    return json.dumps(rows, separators=(",", ":")).encode()


def decode_specs(data: bytes) -> tuple[TensorSpec, ...]:
    """The specs that `encode_specs` wrote."""
    return tuple(
        TensorSpec(
            dtype=getattr(torch, dtype_name), shape=tuple(shape), stride=tuple(stride), requires_grad=requires_grad
        )
        for dtype_name, shape, stride, requires_grad in json.loads(data)
    )


@dataclass(frozen=True, slots=True)
class CrossingSpecs:
    """The specs of what one unit hands across a cut, and of the gradients that come back."""

    values: tuple[TensorSpec, ...]
    gradients: tuple[TensorSpec, ...]
    value_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, values: tuple[TensorSpec, ...]) -> CrossingSpecs:
        """From those of the values: there is a gradient for each that requires one."""
        gradients = tuple(replace(spec, requires_grad=False) for spec in values if spec.requires_grad)
        value_bytes, gradient_bytes = (sum(spec.num_bytes for spec in specs) for specs in (values, gradients))
        return cls(values, gradients, value_bytes, gradient_bytes)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are those of these tensors."""
        return len(tensors) == len(self.values) and all(map(TensorSpec.fits, self.values, tensors))


class SpecBook(dict[Hashable, CrossingSpecs]):
    """The specs of the values that cross one cut, by signature.

    Sender and receiver each keep one, fill it in the same order and forget the oldest entry at the same length, so that
    both know without asking whether a signature is new.
    """

    MAX_SIGNATURES = 4096

    def add(self, signature: Hashable, values: tuple[TensorSpec, ...]) -> CrossingSpecs:
        """Remember the specs of a new signature."""
        if len(self) >= self.MAX_SIGNATURES:
            del self[next(iter(self))]
        specs = self[signature] = CrossingSpecs.of(values)
        return specs

    def check(self, signature: Hashable, tensors: Sequence[Tensor]) -> CrossingSpecs | None:
        """Compare what is sent with what the receiver was told of this signature; give that, None if it is new.

        Raises:
            PipelineRuntimeError: Something differs.
        """
        found = self.get(signature)
        if found is None or found.fit(tensors):
            return found
        known, specs = found.values, tuple(TensorSpec.of(tensor) for tensor in tensors)
        if len(known) != len(specs):
            difference = f"{len(specs)} values instead of {len(known)}"
        else:
            index = next(i for i, (old, new) in enumerate(zip(known, specs, strict=True)) if old != new)
            difference = f"value {index} is {specs[index]}, it was {known[index]}"
        raise PipelineRuntimeError(
            "the values that cross to the next stage differ from those of an earlier micro-batch with the signature "
            f"{signature!r}: {difference}. The step does something that its input shapes do not tell (a branch on "
            "values, a change of requires_grad); the other stages cannot follow that."
        )


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _packed_stride(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _check_can_cross(tensor: Tensor) -> None:
    reason = None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        reason = f"it is a {type(tensor).__name__}, which holds no plain memory"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        reason = f"its layout is {'nested' if tensor.is_nested else tensor.layout}"
    elif tensor.is_quantized:
        reason = "it is quantized"
    elif tensor.is_meta:
        reason = "it is on the meta device"
    if reason is not None:
        raise PipelineRuntimeError(
            f"a value of shape {list(tensor.shape)} cannot cross to the next stage: {reason}. Cut at another place."
        )
