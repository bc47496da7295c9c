"""Objects between the ranks of a pipeline, and between replicas.

These are the small, rare messages: batches, step reports, checkpoints. Activations and gradients have transports of
their own, on groups of their own, so that nothing here waits behind a large reduction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.strategy.message import pack, unpack

_HEAD_BYTES = 8
_SHORT_BYTES = 8192


class Communicator:
    """One rank's place in the layout, and its groups for objects. All groups work on host memory (gloo).

    Args:
        layout: Stages and replicas.
        global_rank: This rank.
        device: Where received accelerator tensors are put.
        world_group: All ranks; None where there is one rank only.
        pipeline_group: The ranks of this replica; None where it has one stage.
        replica_group: The ranks of this stage; None where there is one replica.
    """

    def __init__(
        self,
        *,
        layout: ParallelLayout,
        global_rank: int,
        device: torch.device,
        world_group: dist.ProcessGroup | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.layout = layout
        self.global_rank = global_rank
        self.device = device
        self.world_group = world_group
        self.pipeline_group = pipeline_group
        self.replica_group = replica_group
        self.guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """A context for collectives between steps: errors that another rank's failure has caused are raised as that."""
        self.stage_index = layout.stage_index(global_rank)
        self.replica_index = layout.replica_index(global_rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank loads the data."""
        return self.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage_index == self.layout.num_stages - 1

    def broadcast_in_pipeline(self, value: Any, *, stage_index: int) -> Any:
        """The value that one stage gives, on every rank of its pipeline."""
        source = self.layout.global_rank(stage_index, self.replica_index)
        return self._broadcast(value, source, self.pipeline_group)

    def broadcast_in_world(self, value: Any, *, source: int = 0) -> Any:
        """The value that one global rank gives, on every rank."""
        return self._broadcast(value, source, self.world_group)

    def gather_in_pipeline(self, value: Any) -> list[Any]:
        """The values of all ranks of this pipeline, in the order of their stages, on each of them."""
        ranks = self.layout.pipeline_ranks(self.replica_index)
        return self._gather(value, ranks, self.pipeline_group)

    def gather_in_world(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on each of them."""
        return self._gather(value, range(self.layout.world_size), self.world_group)

    def gather_over_replicas(self, value: Any) -> list[Any]:
        """The values of all ranks of this stage, in the order of their replicas, on each of them."""
        return self._gather(value, self.layout.stage_ranks(self.stage_index), self.replica_group)

    def broadcast_numbers(self, numbers: Sequence[int], *, stage_index: int) -> list[int]:
        """A fixed count of integers that one stage gives, on every rank of its pipeline: one small message."""
        if self.pipeline_group is None:
            return list(numbers)
        message = torch.tensor(numbers, dtype=torch.int64)
        source = self.layout.global_rank(stage_index, self.replica_index)
        dist.broadcast(message, src=source, group=self.pipeline_group)
        return [int(number) for number in message]

    def all_replicas_agree(self, decision: bool) -> bool:
        """Whether the decision is True on this stage's rank of every replica."""
        if self.replica_group is None:
            return decision
        votes = torch.tensor([int(decision)], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.replica_group)
        return bool(votes.item())

    def sum_in_pipeline(self, value: float) -> float:
        """The sum of a number over the ranks of this pipeline, in float64."""
        if self.pipeline_group is None:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self.pipeline_group)
        return float(total.item())

    def send(self, tensor: Tensor, *, destination: int) -> None:
        """Sends a tensor to a global rank, which must `receive` it."""
        assert self.world_group is not None, "there is nobody to send to"
        dist.send(tensor.detach().cpu().contiguous(), dst=destination, group=self.world_group)

    def receive(self, tensor_like: Tensor, *, source: int) -> Tensor:
        """The tensor that a global rank sends, in host memory; it has the other's shape and dtype."""
        assert self.world_group is not None, "there is nobody to receive from"
        received = torch.empty(tensor_like.shape, dtype=tensor_like.dtype, device="cpu")
        dist.recv(received, src=source, group=self.world_group)
        return received

    def send_object(self, value: Any, *, destination: int) -> None:
        """Sends an object to a global rank, which must `receive_object` it."""
        message = pack(value)
        self.send(torch.tensor([message.numel()]), destination=destination)
        self.send(message, destination=destination)

    def receive_object(self, *, source: int) -> Any:
        """The object that a global rank sends; accelerator tensors come in host memory."""
        size = self.receive(torch.empty(1, dtype=torch.int64), source=source)
        message = self.receive(torch.empty(int(size.item()), dtype=torch.uint8), source=source)
        return unpack(message, torch.device("cpu"))

    def _broadcast(self, value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
        if group is None:
            return value
        if source == self.global_rank:
            message = pack(value)
            dist.broadcast(torch.tensor([message.numel()]), src=source, group=group)
            dist.broadcast(message, src=source, group=group)
            return value
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=source, group=group)
        message = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.broadcast(message, src=source, group=group)
        return unpack(message, self.device)

    def _gather(self, value: Any, ranks: Sequence[int], group: dist.ProcessGroup | None) -> list[Any]:
        if group is None:
            return [value]
        message = pack(value)
        # What is short, as a step's report mostly is, goes in one collective together with its size.
        head = torch.zeros(_HEAD_BYTES + _SHORT_BYTES, dtype=torch.uint8)
        head[:_HEAD_BYTES] = torch.tensor([message.numel()]).view(torch.uint8)
        short = message[:_SHORT_BYTES]
        head[_HEAD_BYTES : _HEAD_BYTES + short.numel()] = short
        messages = _all_gather(head, len(ranks), group)
        sizes = [int(other[:_HEAD_BYTES].view(torch.int64).item()) for other in messages]
        messages = [other[_HEAD_BYTES:] for other in messages]
        longest = max(sizes)
        if longest > _SHORT_BYTES:
            rest = torch.zeros(longest - _SHORT_BYTES, dtype=torch.uint8)
            rest[: max(message.numel() - _SHORT_BYTES, 0)] = message[_SHORT_BYTES:]
            rests = _all_gather(rest, len(ranks), group)
            messages = [torch.cat(parts) for parts in zip(messages, rests, strict=True)]
        # Groups number their members by ascending global rank; stages run backwards over ranks.
        member_of = {rank: position for position, rank in enumerate(sorted(ranks))}
        return [value if rank == self.global_rank else unpack(messages[member_of[rank]], self.device) for rank in ranks]


def _all_gather(message: Tensor, num_members: int, group: dist.ProcessGroup) -> list[Tensor]:
    received = [torch.empty_like(message) for _ in range(num_members)]
    dist.all_gather(received, message, group=group)
    return received
