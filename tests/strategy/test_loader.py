"""The loader wrapper as one process sees it; several processes are in `test_data`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import (
    _auto_add_worker_init_fn,
    _set_sampler_epoch,
    has_iterable_dataset,
    sized_len,
)
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.loader import PipelineLoader

# Lightning itself is not free of warnings under the newest torch.
pytestmark = pytest.mark.filterwarnings("ignore")

COMMUNICATOR = Communicator(
    layout=ParallelLayout(num_stages=1, num_replicas=1), global_rank=0, device=torch.device("cpu")
)


def wrapped(loader: Any, **options: Any) -> PipelineLoader:
    return PipelineLoader(loader, COMMUNICATOR, replicas_end_together=True, **options)


def drawn(loader: PipelineLoader) -> list[Any]:
    """All batches, as Lightning's loops draw them."""
    combined = CombinedLoader(loader, "sequential")
    return [batch for batch, _, _ in iter(combined)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


class StatefulLoader(DataLoader[Any]):
    position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_batches_and_lengths() -> None:
    loader = wrapped(DataLoader(range(10), batch_size=4))
    assert [batch.tolist() for batch in drawn(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sized_len(loader) == 3
    assert sized_len(wrapped(DataLoader(Stream()))) is None
    assert has_iterable_dataset(wrapped(DataLoader(Stream())))  # type: ignore[arg-type]
    assert drawn(wrapped([])) == []


def test_what_lightning_asks_and_sets_reaches_the_loader() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(range(8), num_replicas=2, rank=1)  # type: ignore[arg-type]
    inner = DataLoader(range(8), sampler=sampler)  # type: ignore[arg-type,var-annotated]
    loader = wrapped(inner)
    _set_sampler_epoch(loader, 3)
    assert sampler.epoch == 3
    loader._iterator = "something"
    assert inner._iterator == "something"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_SEED_WORKERS", "1")
        _auto_add_worker_init_fn(loader, 0)
    assert inner.worker_init_fn is not None
    assert loader.dataset is inner.dataset
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such


def test_state_of_a_loader_that_has_one() -> None:
    plain, stateful = wrapped(DataLoader(range(3))), wrapped(StatefulLoader(range(3)))  # type: ignore[arg-type]
    assert not isinstance(plain, _Stateful)
    assert isinstance(stateful, _Stateful)
    stateful.load_state_dict({"position": 5})
    assert stateful.state_dict() == {"position": 5}


def test_peek_gives_what_will_be_given() -> None:
    loader = wrapped(DataLoader(Stream(), batch_size=2))
    combined = CombinedLoader(loader, "sequential")
    iterator = iter(combined)
    assert loader.peek().tolist() == [0, 1]
    assert loader.peek().tolist() == [0, 1]
    assert [batch.tolist() for batch, _, _ in iterator] == [[0, 1], [2, 3]]


def test_peek_gives_what_was_given() -> None:
    loader = wrapped(DataLoader(Stream(), batch_size=2), remember_first=True)
    iterator = iter(CombinedLoader(loader, "sequential"))
    first = next(iterator)[0]
    assert loader.peek() is first
    loader.forget_first()
    assert [batch.tolist() for batch, _, _ in [next(iterator)]] == [[2, 3]]


def test_peek_of_nothing() -> None:
    loader = wrapped([])
    iterator = iter(CombinedLoader(loader, "sequential"))
    with pytest.raises(StopIteration):
        loader.peek()
    with pytest.raises(StopIteration):
        next(iterator)
