"""Which tensors have a size that depends on values, so that another batch of the same shapes gives them another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import is_absent

# Take indices of any number, and give a tensor of the size of their first argument.
_AS_LARGE_AS_SELF = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "index_put",
        "index_add",
        "index_copy",
        "index_fill",
        "masked_scatter",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    )
)


class DataSizes:
    """Follows real tensors from what sized them by values (`nonzero`, `x[mask]`) to what is made of them."""

    def __init__(self) -> None:
        # By storage, so that views count; kept alive, so that no other storage gets the key.
        self._sized: dict[int, Tensor] = {}

    def is_sized_by_data(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Tell whether what an ATen operation gives is sized by values, and remember it where it is real."""
        if func._overloadpacket in _AS_LARGE_AS_SELF:
            is_sized = self.is_known(args[0])
        else:
            is_sized = _counts_values(func, args) or (
                bool(self._sized) and any(self.is_known(tensor) for _, tensor in tree.tensors((args, kwargs)))
            )
        if is_sized:
            given = {id(tensor) for _, tensor in tree.tensors((args, kwargs))}
            for _, tensor in tree.tensors(result):
                is_new = id(tensor) not in given  # else it was written in place, which changes no size
                if is_new and not is_absent(tensor) and tensor.dim() > 0:
                    self._sized[_storage(tensor)] = tensor
        return is_sized

    def is_known(self, tensor: Tensor) -> bool:
        """Tell whether a real tensor was sized by values."""
        return not is_absent(tensor) and tensor.dim() > 0 and _storage(tensor) in self._sized


def _counts_values(func: Any, args: Any) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:  # only a mask's values count; whole numbers are as many as their shape says
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
