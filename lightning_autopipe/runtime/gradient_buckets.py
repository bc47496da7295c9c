"""Gradients joined to vectors of about equal size, each summed over a group by one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

Sums = dict[str, Tensor]
"""Summed gradients, by name."""


def plan_buckets(parameters: Mapping[str, nn.Parameter], bucket_bytes: int) -> list[tuple[str, ...]]:
    """Joins the names of parameters of one dtype and device to buckets, in the order in which these are full.

    Args:
        parameters: In the order in which their gradients are expected.
        bucket_bytes: What a bucket holds at most; a larger gradient has one of its own.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[str]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, parameter in parameters.items():
        kind = parameter.dtype, parameter.device
        size = parameter.numel() * parameter.element_size()
        buckets = by_kind.setdefault(kind, [[]])
        if buckets[-1] and sizes[kind] + size > bucket_bytes:
            buckets.append([])
            sizes[kind] = 0
        buckets[-1].append(name)
        sizes[kind] = sizes.get(kind, 0) + size
    position = {name: index for index, name in enumerate(parameters)}
    buckets = [bucket for same_kind in by_kind.values() for bucket in same_kind]
    return [tuple(bucket) for bucket in sorted(buckets, key=lambda bucket: position[bucket[-1]])]


class BucketSum:
    """The sum of one bucket over a group, under way from the start on, in place.

    Args:
        gradients: Dense ones of one dtype and device, by name.
        group: The processes.
    """

    def __init__(self, gradients: Sums, group: dist.ProcessGroup) -> None:
        self._gradients = gradients
        flats = [gradient.reshape(-1) for gradient in gradients.values()]
        # A single one without a copy, where its memory is in order.
        self._flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        self._work = all_reduce(self._flat, dist.ReduceOp.SUM, group)

    @property
    def is_completed(self) -> bool:
        """Whether `finish` need not wait."""
        return self._work.is_completed()

    def finish(self) -> Sums:
        """Waits for the sum; gives it in the memory of the gradients."""
        self._work.wait()
        offset = 0
        for gradient in self._gradients.values():
            part = self._flat[offset : offset + gradient.numel()].view(gradient.shape)
            offset += gradient.numel()
            if part.data_ptr() != gradient.data_ptr():
                gradient.copy_(part)
        return self._gradients


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
    """Starts an all-reduce."""
    work: dist.Work | None = dist.all_reduce(tensor, operation, group=group, async_op=True)
    assert work is not None, "this rank is not in the group"
    return work
