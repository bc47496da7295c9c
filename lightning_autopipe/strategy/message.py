"""Any picklable object as one message: its structure pickled, its tensors raw.

Pickling a tensor copies it twice and keeps nothing of where it lay; here the pickle holds an index for each tensor, and
the numbers follow as bytes.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.core.errors import BatchError
from lightning_autopipe.runtime.tensor_spec import TensorSpec, as_bytes

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Leaf:
    spec: TensorSpec
    offset_bytes: int
    on_accelerator: bool


def pack(value: Any) -> Tensor:
    """An object as uint8[num_bytes] in host memory.

    Raises:
        BatchError: something in it cannot be pickled.
    """
    tensors: list[Tensor] = []
    file = io.BytesIO()
    try:
        _StructurePickler(file, tensors).dump(value)
    except Exception as error:
        raise BatchError(
            f"an object of type {type(value).__name__} cannot be sent to the other stages of its pipeline: "
            f"{type(error).__name__}: {error}. Make everything in it picklable (no lambdas, generators, open files)"
        ) from error
    structure = file.getvalue()
    leaves: list[_Leaf] = []
    # Two numbers, the structure, the leaves' places, then the numbers of each leaf.
    end = 0
    for tensor in tensors:
        spec = TensorSpec.of(tensor)
        leaves.append(_Leaf(spec, end, tensor.device.type != "cpu"))
        end = _aligned(end + spec.num_bytes)
    places = pickle.dumps(leaves)
    head = torch.tensor([len(structure), len(places)], dtype=torch.int64).view(torch.uint8)
    begin = _aligned(head.numel() + len(structure) + len(places))
    message = torch.zeros(begin + end, dtype=torch.uint8)
    text = torch.frombuffer(bytearray(structure + places), dtype=torch.uint8)
    message[: head.numel()] = head
    message[head.numel() : head.numel() + text.numel()] = text
    for tensor, leaf in zip(tensors, leaves, strict=True):
        first = begin + leaf.offset_bytes
        message[first : first + leaf.spec.num_bytes] = as_bytes(tensor)
    return message


def unpack(message: Tensor, device: torch.device) -> Any:
    """The object that `pack` made a message of; tensors that lay on an accelerator are put on ``device``.

    Every tensor has memory of its own, so that the receiver's tensors alias each other as little as the sender's.
    """
    structure_bytes, places_bytes = (int(number) for number in message[:16].view(torch.int64))
    text = message[16 : 16 + structure_bytes + places_bytes].numpy().tobytes()
    leaves: list[_Leaf] = pickle.loads(text[structure_bytes:])
    begin = _aligned(16 + len(text))
    tensors = [_read(message, begin, leaf, device) for leaf in leaves]
    return _StructureUnpickler(io.BytesIO(text[:structure_bytes]), tensors).load()


def _read(message: Tensor, begin: int, leaf: _Leaf, device: torch.device) -> Tensor:
    tensor = leaf.spec.empty(torch.device("cpu"))
    first = begin + leaf.offset_bytes
    as_bytes(tensor).copy_(message[first : first + leaf.spec.num_bytes])
    if leaf.on_accelerator:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if leaf.spec.requires_grad else tensor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _travels_raw(value: object) -> bool:
    # Anything special (subclasses, sparse, nested, quantized) knows how to pickle itself.
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and not value.is_meta
    )


class _StructurePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._index_of: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not _travels_raw(obj):
            return None
        # One object that occurs twice arrives as one object.
        index = self._index_of.get(id(obj))
        if index is None:
            index = self._index_of[id(obj)] = len(self._tensors)
            self._tensors.append(obj)
        return index


class _StructureUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        tensor: Tensor = self._tensors[pid]
        return tensor
