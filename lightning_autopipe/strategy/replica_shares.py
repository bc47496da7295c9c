"""Unlike shares of each global batch, for replicas that take unlike numbers of micro-batches.

A *global batch* is what all replicas train on in one step: the next ``batch_size × num_replicas`` samples in the order
of the sampler. Under DDP each replica takes every so many-th of them; here replica r takes as many as its
micro-batches are of all, so that micro-batches have one size everywhere. Which samples a step has does not change.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_autopipe.core.errors import ConfigurationError


@lru_cache(maxsize=64)
def share_samples(num_samples: int, replica_microbatches: tuple[int, ...]) -> tuple[int, ...]:
    """How many samples each replica takes: the largest micro-batch is as small as it can be, and none is empty.

    Args:
        num_samples: Of a global batch, at least one for each replica.
        replica_microbatches: Micro-batches of each replica.
    """
    assert num_samples >= len(replica_microbatches), "a sampler that shares data pads them to one for each replica"
    shares = [1] * len(replica_microbatches)
    # Entries: samples in a replica's micro-batches, on average, if it takes one more.
    sizes = [(2 / number, index) for index, number in enumerate(replica_microbatches)]
    heapify(sizes)
    for _ in range(num_samples - len(shares)):
        _, index = sizes[0]
        shares[index] += 1
        heapreplace(sizes, ((shares[index] + 1) / replica_microbatches[index], index))
    return tuple(shares)


class DealtBatchSampler(BatchSampler):
    """The batches of one replica: its share of each global batch.

    Args:
        sampler: Shares the samples between replicas equally, as Lightning injects it; its epoch, shuffling, padding and
            order are kept.
        batch_size: Of a replica on average.
        drop_last: Whether the last global batch is dropped where it is not full.
        replica_microbatches: Micro-batches of each replica.
        replica_index: Whose batches these are.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        batch_size: int,
        drop_last: bool,
        *,
        replica_microbatches: tuple[int, ...],
        replica_index: int,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.replica_microbatches = replica_microbatches
        self.replica_index = replica_index

    def __iter__(self) -> Iterator[list[int]]:
        samples = _of_all_replicas(self.sampler)
        num_samples = self.batch_size * len(self.replica_microbatches)
        while batch := list(itertools.islice(samples, num_samples)):
            if self.drop_last and len(batch) < num_samples:
                return
            shares = share_samples(len(batch), self.replica_microbatches)
            begin = sum(shares[: self.replica_index])
            yield batch[begin : begin + shares[self.replica_index]]


def dealt(loader: object, *, replica_microbatches: tuple[int, ...], replica_index: int) -> object:
    """A training loader whose batches are one replica's share of each global batch.

    Args:
        loader: As Lightning prepares it for one of several replicas; it stays as it is.
        replica_microbatches: Micro-batches of each replica.
        replica_index: Whose loader it is.

    Raises:
        ConfigurationError: global batches are not known before they are loaded, or not made in the usual way.
    """
    problem = why_not_dealt(loader, num_replicas=len(replica_microbatches))
    if problem:
        raise ConfigurationError(
            f"the plan gives its replicas unlike numbers of micro-batches ({replica_microbatches}), so each takes "
            f"another share of each global batch; but {problem}. Train from a DataLoader over a map-style dataset with "
            "a batch_size and Lightning's own distributed sampler, or plan with equal numbers: set num_microbatches, "
            "or make the plan with autopipe plan --equal-replicas"
        )
    assert isinstance(loader, DataLoader)
    assert loader.batch_size is not None
    own = copy.copy(loader)
    batches = DealtBatchSampler(
        loader.sampler,  # type: ignore[arg-type]
        loader.batch_size,
        loader.drop_last,
        replica_microbatches=replica_microbatches,
        replica_index=replica_index,
    )
    vars(own).update(batch_sampler=batches, _iterator=None)  # loaders refuse to have it set
    return own


def why_not_dealt(loader: object, *, num_replicas: int) -> str:
    """Why the batches of a loader that is prepared for one of several replicas cannot be dealt; empty if they can."""
    if not isinstance(loader, DataLoader):
        return f"the training data come from a {type(loader).__name__}, which is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"the dataset {type(loader.dataset).__name__} is a stream (IterableDataset): each replica reads its own"
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return (
            "the training loader does not batch samples (batch_size=None)"
            if loader.batch_sampler is None
            else f"the training loader makes batches by its own batch sampler ({type(loader.batch_sampler).__name__})"
        )
    iterates = type(sampler).__iter__
    if iterates not in (DistributedSampler.__iter__, DistributedSamplerWrapper.__iter__):
        return (
            f"the training loader's sampler ({type(sampler).__name__}) does not share samples between replicas as "
            "DistributedSampler does (use_distributed_sampler=False?)"
        )
    assert isinstance(sampler, DistributedSampler)
    if sampler.num_replicas != num_replicas:
        return (
            f"the training loader's sampler shares samples between {sampler.num_replicas} replicas, not {num_replicas}"
        )
    return ""


def _of_all_replicas(sampler: Any) -> Iterator[int]:
    """What a distributed sampler gives to all replicas together, in its order and with its padding."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.num_samples = 1, 0, sampler.total_size
    return iter(whole)
