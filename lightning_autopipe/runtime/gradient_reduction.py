"""Sums gradients over the processes that hold the same parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopipe.runtime.errors import CommunicationError

_NO_GRADIENT, _DENSE, _SPARSE = 0, 1, 2
_MAX_BUCKETS_UNDER_WAY = 2


class GradientReducer:
    """Sums `parameter.grad` over a group, in flat buckets.

    The members first agree on which gradients exist. One that no member has stays None (an optimizer decays the weight
    of a zero gradient but skips None); one that some member has is summed, with zeros from the others.
    """

    def __init__(self, group: dist.ProcessGroup, *, name: str, bucket_bytes: int = 25 * 2**20) -> None:
        """Reduce over `group`, all members of which pass the same parameters in the same order to `reduce`.

        Args:
            group: The processes.
            name: For errors, such as "the replicas of stage 1".
            bucket_bytes: Gradients of one dtype are joined to messages of about this size.
        """
        self.num_reductions = 0
        """How often `reduce` has summed over more than one process."""
        self.num_collectives = 0
        """How many collectives that took."""
        self._group = group
        self._name = name
        self._bucket_bytes = bucket_bytes

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace every parameter's gradient by the sum over the group.

        Raises:
            CommunicationError: A member did not join within the group's limit, or its connection broke.
        """
        if not parameters or dist.get_world_size(self._group) == 1:
            return
        self.num_reductions += 1
        try:
            kinds = self._agree_on_kinds(list(parameters.values()))
            dense = []
            for parameter, kind in zip(parameters.values(), kinds, strict=True):
                if kind == _SPARSE:
                    self._reduce_sparse(parameter)
                elif kind == _DENSE:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dense.append(parameter.grad)
            self._reduce_dense(dense)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"global rank {dist.get_rank()}: the sum of gradients over {self._name} "
                f"(global ranks {dist.get_process_group_ranks(self._group)}) failed: {error}"
            ) from error

    def _agree_on_kinds(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        kinds = torch.tensor([_kind(parameter) for parameter in parameters], dtype=torch.uint8)
        kinds = kinds.to(parameters[0].device)
        self._all_reduce(kinds, dist.ReduceOp.MAX).wait()
        return [int(kind) for kind in kinds.tolist()]

    def _reduce_sparse(self, parameter: nn.Parameter) -> None:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.to_sparse(1).coalesce() if gradient.layout is torch.strided else gradient.coalesce()
        self._all_reduce(gradient, dist.ReduceOp.SUM).wait()
        parameter.grad = gradient

    def _reduce_dense(self, gradients: Sequence[Tensor]) -> None:
        under_way: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
        for bucket in self._buckets(gradients):
            flat = _flatten(bucket)
            under_way.append((bucket, flat, self._all_reduce(flat, dist.ReduceOp.SUM)))
            if len(under_way) >= _MAX_BUCKETS_UNDER_WAY:
                _finish(*under_way.popleft())
        while under_way:
            _finish(*under_way.popleft())

    def _buckets(self, gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for gradient in gradients:
            by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for same_kind in by_kind.values():
            bucket: list[Tensor] = []
            num_bytes = 0
            for gradient in same_kind:
                size = gradient.numel() * gradient.element_size()
                if bucket and num_bytes + size > self._bucket_bytes:
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append(gradient)
                num_bytes += size
            yield bucket

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        self.num_collectives += 1
        work: dist.Work | None = dist.all_reduce(tensor, operation, group=self._group, async_op=True)
        assert work is not None, "this rank is not in the group"
        return work


def _kind(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NO_GRADIENT
    return _DENSE if parameter.grad.layout is torch.strided else _SPARSE


def _flatten(bucket: Sequence[Tensor]) -> Tensor:
    """The gradients as one vector; a single large one in place, without a copy."""
    flats = [gradient.detach().reshape(-1) for gradient in bucket]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def _finish(bucket: Sequence[Tensor], flat: Tensor, work: dist.Work) -> None:
    work.wait()
    offset = 0
    for gradient in bucket:
        part = flat[offset : offset + gradient.numel()].view(gradient.shape)
        offset += gradient.numel()
        if part.data_ptr() != gradient.data_ptr():
            gradient.detach().copy_(part)
