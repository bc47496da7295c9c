"""What loaders, samplers and datasets note while a batch is read ahead is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_autopipe.strategy.data_state import preserved_data_state


class CountingSampler(Sampler[int]):
    """Another order in every epoch, by what it has counted itself."""

    def __init__(self) -> None:
        self.epoch = 0
        self.epochs_seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.epochs_seen.append(self.epoch)
        self.last_order = torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(self.last_order)

    def __len__(self) -> int:
        return 8


class CountingData(Dataset[Any]):
    def __init__(self) -> None:
        self.counts = {"read": 0}
        self.order: Any = torch.arange(8)

    def __getitem__(self, index: int) -> int:
        self.counts["read"] += 1
        self.order = self.order.flip(0)
        return index + 100 * self.counts["read"]

    def __len__(self) -> int:
        return 8


def test_counters_lists_and_attributes_are_put_back() -> None:
    sampler, data = CountingSampler(), CountingData()
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    order, seen = data.order, sampler.epochs_seen
    with preserved_data_state([[loader]]):
        first = [batch.tolist() for batch in loader]
        assert vars(sampler) != {"epoch": 0, "epochs_seen": []}
    assert vars(sampler) == {"epoch": 0, "epochs_seen": []}
    assert sampler.epochs_seen is seen
    assert data.counts == {"read": 0}
    assert data.order is order
    assert [batch.tolist() for batch in loader] == first


def test_an_error_inside_leaves_the_state_too() -> None:
    sampler = CountingSampler()
    try:
        with preserved_data_state([sampler]):
            list(sampler)
            raise KeyError
    except KeyError:
        pass
    assert sampler.epoch == 0


class Link:
    def __init__(self, following: object) -> None:
        self.following = following


def test_long_chains_of_objects_are_no_problem() -> None:
    generator = torch.Generator().manual_seed(1)
    chain: object = generator
    for _ in range(5_000):
        chain = Link(chain)
    before = generator.get_state()
    with preserved_data_state([chain]):
        torch.rand(1, generator=generator)
    assert torch.equal(generator.get_state(), before)
    while isinstance(chain, Link):  # one by one: to free them all at once would recurse
        chain = chain.following
