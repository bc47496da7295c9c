"""Means and variances of samples that come in parts: in micro-batches, and in replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.errors import CommunicationError

Moments = dict[str, list[Tensor]]
"""For each layer, by path, and each of its calls: float64[3, num_features] of samples per feature, mean, and sum of
squared differences from the mean."""


class ReplicaMoments:
    """Gathers moments over the replicas of one stage."""

    def __init__(self, group: dist.ProcessGroup, gather_objects: Callable[[Any], list[Any]]) -> None:
        """Gather over a group.

        Args:
            group: The processes that run one stage.
            gather_objects: Gives an object of each of them to all of them, in one order, over host memory.
        """
        self._group = group
        self._gather_objects = gather_objects

    def __call__(self, moments: Moments, means: Mapping[str, Tensor]) -> list[Moments]:
        """Give the moments of each replica. Collective over the group.

        Args:
            moments: This replica's.
            means: For each layer of the stage its running mean.

        Raises:
            CommunicationError: a replica did not join within the group's limit.
        """
        # Where the number of calls depends on the data it may differ; messages must be equally long.
        counts = self._gather_objects([len(moments.get(path, ())) for path in means])
        num_calls = [max(of_path) for of_path in zip(*counts, strict=True)]
        rows: list[Tensor] = []
        for (path, mean), count in zip(means.items(), num_calls, strict=True):
            own = moments.get(path, [])
            nothing = torch.zeros(3, mean.numel(), dtype=torch.float64, device=mean.device)
            rows += [*own, *[nothing] * (count - len(own))]
        if not rows:
            return [moments]
        message = torch.cat(rows, dim=1)
        messages = gathered_over_replicas(message, self._group)
        gathered: list[Moments] = []
        for received in messages:
            calls = iter(torch.split(received, [row.shape[1] for row in rows], dim=1))
            gathered.append(
                {path: [next(calls) for _ in range(count)] for path, count in zip(means, num_calls, strict=True)}
            )
        return gathered


def gathered_over_replicas(message: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Give the messages of all members, which are equally long, in one order. Collective over the group.

    Raises:
        CommunicationError: a replica did not join within the group's limit, or its connection broke.
    """
    messages = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(messages, message, group=group)
    except RuntimeError as error:
        raise CommunicationError(
            f"global rank {dist.get_rank()}: exchanging batch statistics with the other replicas of its stage "
            f"(global ranks {dist.get_process_group_ranks(group)}) failed: {error}"
        ) from error
    return messages


@torch.no_grad()
def moments_of(input: Tensor) -> Tensor:
    """Give samples per feature, mean and sum of squared differences: float64[3, num_features].

    `input` is [num_samples, num_features, ...].
    """
    # A half-precision mean is too coarse to combine; the layer itself computes in float32, too.
    values = input.detach() if input.dtype in (torch.float32, torch.float64) else input.detach().float()
    dims = [dim for dim in range(values.dim()) if dim != 1]
    variance, mean = torch.var_mean(values, dim=dims, correction=0)
    num_samples = values.numel() // values.shape[1]
    mean = mean.double()
    return torch.stack([torch.full_like(mean, num_samples), mean, variance.double() * num_samples])


def combined(parts: list[Tensor]) -> Tensor:
    """Give the moments of samples that come in parts.

    The updating formula of Chan, Golub and LeVeque (1979): differences of means, never of large sums of squares.
    """
    counts, means, squares = torch.stack(parts).unbind(1)
    total = counts.sum(0)
    mean = (counts / total * means).sum(0)
    return torch.stack([total, mean, (squares + counts * (means - mean) ** 2).sum(0)])


def merged(replicas: list[Moments]) -> Moments:
    """Give the moments over all replicas, each of which has the same layers and calls."""
    return {
        path: [combined(list(parts)) for parts in zip(*(replica[path] for replica in replicas), strict=True)]
        for path in replicas[0]
    }
