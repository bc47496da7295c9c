"""Operations that were not run, written down so that they can be run later with the same result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_autopipe.capture.absent import AbsentTensor
from lightning_autopipe.core.errors import CaptureError

SMALL = 1024
"""Elements of a tensor from which on its making is recorded. Smaller ones are made at once: they are often read."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands in a recorded call for a tensor whose value is still to be computed."""

    meta: Tensor
    held: torch.UntypedStorage
    """At the time of the call: `set_` gives a tensor another one."""

    @classmethod
    def to(cls, tensor: AbsentTensor) -> Reference:
        return cls(tensor.meta, tensor.meta.untyped_storage())

    @property
    def storage(self) -> int:
        return int(self.held._cdata)


@dataclass(frozen=True, slots=True)
class Given:
    """A real tensor in a recorded call, which must not be written before the call is run."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if _version(self.tensor) != self.version:
            raise CaptureError(
                f"a tensor of shape {tuple(self.tensor.shape)} gave a parameter its first values in configure_model "
                "and was written afterwards, before they could be taken over; give the parameter a copy (clone())"
            )
        return self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One operation that was not run: what it takes, makes and writes, and the random state that it draws from."""

    function: Any
    args: Any
    kwargs: Any
    made: tuple[Reference, ...]
    written: frozenset[int]
    """Storages."""
    altered: Tensor | None
    """What has another shape or storage afterwards."""
    overwritten: int | None
    """The storage whose values before do not matter."""
    generator_state: tuple[torch.Generator, Tensor] | None
    default_dtype: torch.dtype

    def references(self) -> Iterator[Reference]:
        return (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Reference))

    def run(self, real: Mapping[int, Tensor]) -> list[Tensor]:
        """Run it, given the values of what it takes by the identity of their shapes; give what it makes."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Reference):
                return real[id(leaf.meta)]
            return leaf.value() if isinstance(leaf, Given) else leaf

        args, kwargs = pytree.tree_map(value, (self.args, self.kwargs))
        with _drawing_from(self.generator_state), _default_dtype(self.default_dtype):
            result = self.function(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)] if self.made else []


@contextmanager
def plainly() -> Iterator[None]:
    """Without any mode: what runs inside is run for real."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _drawing_from(state: tuple[torch.Generator, Tensor] | None) -> Iterator[None]:
    if state is None:
        yield
        return
    generator, recorded = state
    before = generator.get_state()
    generator.set_state(recorded)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def as_recorded(leaf: Any) -> Any:
    """What a call takes, as it is written down."""
    if isinstance(leaf, AbsentTensor):
        return Reference.to(leaf)
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    if leaf.numel() < SMALL:
        with plainly():
            return leaf.detach().clone()
    return Given(leaf, _version(leaf))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def storage_of(meta: Tensor) -> int:
    """Tell tensors apart by their memory."""
    return int(meta.untyped_storage()._cdata)
