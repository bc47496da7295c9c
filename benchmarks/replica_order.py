"""Data modules that give one process the batches of two replicas, joined, in the order in which the replicas read them.

One process and two replicas then compute the same: the samples of each step and of each micro-batch are equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler

from recipes.images import DigitsDataModule
from recipes.text import MaskedTextDataModule

NUM_REPLICAS = 2


class ReplicaOrder(Sampler[list[int]]):
    """Batches of `batch_size` samples of each replica, as the sampler that Lightning gives to replicas draws them."""

    def __init__(self, dataset: Any, *, batch_size: int, drop_last: bool) -> None:
        seed = int(os.environ["PL_GLOBAL_SEED"])
        self._by_replica = [
            DistributedSampler(dataset, num_replicas=NUM_REPLICAS, rank=replica_index, shuffle=True, seed=seed)
            for replica_index in range(NUM_REPLICAS)
        ]
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler = self  # where Lightning looks for set_epoch

    def set_epoch(self, epoch: int) -> None:
        for sampler in self._by_replica:
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        num_samples = len(self._by_replica[0])
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        orders = [list(sampler) for sampler in self._by_replica]
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield [index for order in orders for index in order[start : start + self.batch_size]]


def in_replica_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Give a training loader's samples in the order of replicas, for a Trainer with use_distributed_sampler=False."""
    assert loader.batch_size is not None
    order = ReplicaOrder(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last)
    return DataLoader(loader.dataset, batch_sampler=order, collate_fn=loader.collate_fn)


class DigitsInReplicaOrder(DigitsDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return in_replica_order(super().train_dataloader())


class MaskedTextInReplicaOrder(MaskedTextDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return in_replica_order(super().train_dataloader())
