"""Counting bytes: what autograd keeps, and what is alive at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import is_absent


class StorageSet:
    """A set of the memory of tensors; keeps it alive, so that no other tensor can take its place."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._storages: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Add the memory of a tensor, if it has any."""
        for storage in storages_of(tensor):
            self._storages[storage._cdata] = storage

    def __contains__(self, storage: UntypedStorage) -> bool:
        return storage._cdata in self._storages


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Give the memory that a tensor uses: none if it is absent, several if it is sparse."""
    with torch._C.DisableTorchFunction():
        if is_absent(tensor):
            return []
        try:
            return [tensor.untyped_storage()]
        except (NotImplementedError, RuntimeError):
            pass
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
        return []


class _Kept:
    """What autograd holds in the place of a saved tensor; dies with its node of the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """A context in which the tensors that autograd saves for backward are counted.

    Tensors inside a checkpointed region are not seen, and not kept: they are computed again.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._kept.add(kept)
        return kept

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def storages(self, *, without: StorageSet) -> list[UntypedStorage]:
        """Give the memory that is still kept, each piece once, but for what is in `without`."""
        found = {s._cdata: s for kept in self._kept for s in storages_of(kept.tensor) if s not in without}
        return list(found.values())


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the bytes of the tensors made inside it, and the most that were alive at a time.

    Memory that an operation uses inside itself is not seen. Tensors from outside do not count, nor do their views.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for _, tensor in tree.tensors((args, kwargs)):
            for storage in storages_of(tensor):
                self._know(storage, 0)
        result = func(*args, **kwargs)
        for _, tensor in tree.tensors(result):
            for storage in storages_of(tensor):
                self._know(storage, storage.nbytes() if storage.device.type != "meta" else 0)
        return result

    def _know(self, storage: UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def forget(_: Any) -> None:
            self._known.pop(key, None)
            self.live_bytes -= num_bytes

        self._known[key] = weakref.ref(storage, forget)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]
