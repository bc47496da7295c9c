"""A search gives no more replicas than can have training data of their own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_autopipe.strategy.replica_limit import can_be_dealt, shareable_counts

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")

DATA: Any = list(range(32))


class OtherBatches:
    """Batches of indices by a class that Lightning cannot make anew."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


def counts(*loaders: Any, mode: Any = "max_size_cycle", may_inject: bool = True, **trainer: Any) -> tuple[int, ...]:
    settings = {
        "world_size": 4,
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
    }
    stub: Any = SimpleNamespace(**(settings | trainer))
    return shareable_counts(stub, CombinedLoader(list(loaders), mode), may_inject=may_inject)


def of_eight(num_samples: int = 32, **options: Any) -> DataLoader[Any]:
    return DataLoader(DATA[:num_samples], batch_size=8, **options)


@pytest.mark.parametrize(
    ("loader", "settings", "expected"),
    [
        (of_eight(), {}, (1, 2, 4)),
        (of_eight(shuffle=True), {"world_size": 6}, (1, 2, 3, 6)),
        (of_eight(31, drop_last=True), {}, (1, 2, 4)),
        (of_eight(17, drop_last=True), {}, (1, 2)),
        (of_eight(9, drop_last=True), {}, (1,)),
        (of_eight(9), {}, (1, 2, 4)),
        (of_eight(), {"limit_train_batches": 0.5}, (1, 2)),
        (of_eight(), {"limit_train_batches": 1}, (1, 2, 4)),
        (of_eight(), {"val_check_interval": 2}, (1, 2)),
        (of_eight(), {"val_check_interval": 2, "limit_val_batches": 0}, (1, 2, 4)),
        (of_eight(), {"val_check_interval": 2, "check_val_every_n_epoch": None}, (1, 2, 4)),
        (of_eight(), {"may_inject": False}, (1,)),
        (of_eight(sampler=DistributedSampler(DATA, num_replicas=2, rank=0)), {}, (1, 2)),
        (DataLoader(DATA, batch_sampler=OtherBatches()), {}, (1,)),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, False)), {}, (1,)),
        ([[1], [2]], {}, (1,)),
    ],
    ids=[
        "any",
        "divisors of the processes",
        "a batch each",
        "a batch for each of two",
        "one whole batch",
        "a part of a batch each",
        "half of the batches",
        "one batch of each",
        "validation after two",
        "no validation",
        "validation over epochs",
        "nothing is injected",
        "shares of the user's",
        "batch sampler of another kind",
        "batch sampler that Lightning loses",
        "no loader",
    ],
)
def test_numbers_of_replicas_that_can_have_shares(loader: Any, settings: Any, expected: tuple[int, ...]) -> None:
    assert counts(loader, **settings) == expected


def test_the_loader_that_ends_an_epoch_counts() -> None:
    """Validation after two batches: the longer loader has them with two replicas, the shorter one does not."""
    loaders = of_eight(32), of_eight(16)
    assert counts(*loaders, val_check_interval=2) == (1, 2)
    assert counts(*loaders, mode="min_size", val_check_interval=2) == (1,)
    assert counts(of_eight(32), of_eight(9, drop_last=True)) == (1,)


@pytest.mark.parametrize(
    ("loader", "may_inject", "expected"),
    [
        (of_eight(shuffle=True), True, True),
        (of_eight(), False, False),
        (of_eight(sampler=DistributedSampler(DATA, num_replicas=2, rank=0)), False, True),
        (of_eight(sampler=DistributedSampler(DATA, num_replicas=4, rank=0)), False, False),
        (DataLoader(DATA, batch_sampler=OtherBatches()), True, False),
        ([[1], [2]], True, False),
    ],
)
def test_global_batches_are_dealt_where_they_are_known(loader: Any, may_inject: bool, expected: bool) -> None:
    loaders = CombinedLoader([of_eight(), loader] if may_inject else [loader], "min_size")
    assert can_be_dealt(loaders, (1, 2), may_inject=may_inject) is expected
    assert can_be_dealt(CombinedLoader([loader], "min_size"), (1,), may_inject=False)
