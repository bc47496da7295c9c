"""Which tensors of a traced step are activations: their values, their absent twins, and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import AbsentTensor, is_absent
from lightning_autopipe.capture.records import Value

_META = torch.device("meta")


class ValueTable:
    """The activations of one trace.

    A tensor is an activation if it is absent, is the module's state (a parameter, or a buffer that the step writes),
    or shares memory that an activation operation has written. Operations on activations are given *shadows*: absent
    twins of real tensors, whose meta storages alias as the real ones do.

    Args:
        module: Whose state counts.
        written_buffers: Names of buffers that the step is known to write.
        device: Where parameters are taken to be; None: where they are.
    """

    def __init__(self, module: nn.Module, written_buffers: frozenset[str], device: torch.device | None) -> None:
        self.values: list[Value] = []
        self.parameter_names = {id(p): name for name, p in module.named_parameters()}
        self.state_names = dict(self.parameter_names)
        self.state_names.update({id(b): n for n, b in module.named_buffers() if n in written_buffers})
        self.written_buffers = written_buffers
        self.written_parameters: set[str] = set()
        self._device = device
        self._buffer_storages = {
            _storage_key(b): name for name, b in module.named_buffers() if not is_absent(b) and b.numel() > 0
        }
        self._parameter_storages = {_storage_key(p): name for name, p in module.named_parameters() if not is_absent(p)}
        self._value_of: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # keeps objects whose id() is a key
        self._shadows: dict[int, AbsentTensor] = {}
        self._real_of: dict[int, Tensor] = {}
        self._bases: dict[int, Tensor] = {}  # real storage -> meta base that its shadows share
        self._activation_storages: dict[int, int] = {}  # real storage -> position of its first write

    # ----- what a tensor is

    def is_activation(self, tensor: Tensor) -> bool:
        """Tell whether an operation on this tensor belongs to one stage."""
        if is_absent(tensor) or id(tensor) in self.state_names:
            return True
        return bool(self._activation_storages) and _storage_key(tensor) in self._activation_storages

    def is_parameter(self, tensor: Tensor) -> bool:
        """Tell whether this is a parameter of the module."""
        return id(tensor) in self.parameter_names

    def set_flag(self, parameter: Tensor, change: Callable[[], Any]) -> Any:
        """Change whether a parameter requires a gradient; its shadow follows."""
        result = change()
        shadow = self._shadows.get(id(parameter))
        if shadow is not None:
            shadow.requires_grad_(parameter.requires_grad)
        return result

    def is_buffer(self, tensor: Tensor) -> bool:
        """Tell whether this is a buffer that the step writes."""
        return id(tensor) in self.state_names and id(tensor) not in self.parameter_names

    def is_of_unknown_origin(self, tensor: Tensor) -> bool:
        """Tell whether this is an absent tensor that no operation of the trace has made."""
        return is_absent(tensor) and id(tensor) not in self._value_of and id(tensor) not in self.state_names

    def original(self, tensor: Tensor) -> Tensor:
        """Give the tensor that this one is the shadow of, or itself."""
        return self._real_of.get(id(tensor), tensor)

    # ----- values

    def find(self, tensor: Tensor) -> Value | None:
        """Give the value of a tensor that has one."""
        return self._value_of.get(id(tensor))

    def index_of(self, tensor: Tensor) -> int | None:
        """Give the index of a tensor's value, None where it has none."""
        value = self._value_of.get(id(tensor))
        return None if value is None else value.index

    def indices_in(self, obj: object) -> set[int]:
        """Give the indices of all values in a container."""
        return {index for _, t in tree.tensors(obj) if (index := self.index_of(t)) is not None}

    def value(self, tensor: Tensor) -> Value:
        """Give the value of an activation that is no state."""
        value = self._value_of.get(id(tensor))
        if value is None:  # a view that was taken before its base was written
            value = self.new_value(tensor, self._activation_storages[_storage_key(tensor)], None, in_arguments=False)
        return value

    def new_value(self, tensor: Tensor, maker: int, slot: tree.LeafPath | None, *, in_arguments: bool) -> Value:
        """Number a tensor that the operation at `maker` made or wrote, and shows at `slot`."""
        absent = tensor if isinstance(tensor, AbsentTensor) else self._shadow(tensor)
        value = Value(len(self.values), maker, slot, in_arguments, _meta_key(absent), absent)
        self.values.append(value)
        self._value_of[id(tensor)] = value
        self._alive.append(tensor)
        return value

    # ----- absent twins

    def absent_form(self, tensor: Tensor) -> Tensor:
        """Give what an activation operation gets: absent tensors for state and for all that it might write."""
        if is_absent(tensor):
            return tensor
        if self.is_activation(tensor) or tensor.is_floating_point() or tensor.is_complex():
            return self._shadow(tensor)
        return tensor

    def absent_form_of_activation(self, tensor: Tensor) -> Tensor | None:
        """Give the absent twin of an activation, None for any other tensor."""
        return self.absent_form(tensor) if self.is_activation(tensor) else None

    def _shadow(self, tensor: Tensor) -> AbsentTensor:
        shadow = self._shadows.get(id(tensor))
        if shadow is None:
            key = _storage_key(tensor)
            base = self._bases.get(key)
            if base is None:
                num_elements = tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)
                if not num_elements and tensor.numel():  # a parameter whose memory is lent while it is used
                    num_elements = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
                base = self._bases[key] = torch.empty(num_elements, dtype=tensor.dtype, device=_META)
            if base.dtype is tensor.dtype:
                meta = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            else:
                meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
            with torch.inference_mode(False):
                is_parameter = id(tensor) in self.parameter_names
                device = self._device if self._device and is_parameter else tensor.device
                shadow = AbsentTensor(meta, device, tensor.requires_grad)
            self._shadows[id(tensor)] = shadow
            self._real_of[id(shadow)] = tensor
            self._alive.append(tensor)
        return shadow

    # ----- writes

    def written_storages(self, written_tensors: Iterable[Tensor]) -> set[int]:
        """Give the storages (of meta twins) of tensors that an operation wrote; notes state among them."""
        written: set[int] = set()
        for tensor in written_tensors:
            if isinstance(tensor, AbsentTensor):
                written.add(_meta_key(tensor))
                real_key = next((k for k, base in self._bases.items() if _cdata(base) == _meta_key(tensor)), None)
            else:
                real_key = _storage_key(tensor)
                if real_key in self._bases:
                    written.add(_cdata(self._bases[real_key]))
            if real_key is not None and real_key in self._buffer_storages:
                self.written_buffers |= {self._buffer_storages[real_key]}
            if real_key is not None and real_key in self._parameter_storages:
                self.written_parameters.add(self._parameter_storages[real_key])
        return written

    def note_writes(
        self, position: int, found: list[tuple[tree.LeafPath, Tensor]], written: set[int]
    ) -> tuple[tuple[tree.LeafPath, int], ...]:
        """Make activations, from `position` on, of the user's tensors that were written, with their bases and views.

        Gives the paths of the arguments among them and their values.
        """
        if not written:
            return ()
        for key, base in self._bases.items():
            if _cdata(base) in written and key not in self._activation_storages:
                if not any(_storage_key(t) == key for _, t in found if id(t) in self.state_names):
                    self._activation_storages[key] = position
        arguments: list[tuple[tree.LeafPath, int]] = []
        for path, tensor in found:
            if is_absent(tensor) or id(tensor) in self.state_names or id(tensor) in self._value_of:
                continue
            if _storage_key(tensor) in self._activation_storages:
                value = self.new_value(tensor, position, path, in_arguments=True)
                arguments.append((path, value.index))
        return tuple(arguments)

    def reassigned(self, buffers: Mapping[str, Tensor]) -> dict[str, Value]:
        """Give the buffers in whose place the step has put an activation, with its value; they count as written."""
        found: dict[str, Value] = {}
        for name, buffer in buffers.items():
            value = self._value_of.get(id(buffer))
            if value is not None and id(buffer) not in self.state_names:
                found[name] = value
        self.written_buffers |= frozenset(found)
        return found


def _storage_key(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # the trace would take the getters for operations of the step
        if is_absent(tensor) or tensor.layout is not torch.strided:
            return -id(tensor)
        return int(tensor.untyped_storage()._cdata)


def _cdata(meta: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(meta.untyped_storage()._cdata)


def _meta_key(tensor: AbsentTensor) -> int:
    return _cdata(tensor.meta)
