"""Data loaders of a pipeline: the first stage's process loads, the others keep step with it.

A loader on every rank would drift apart from the second epoch on (shuffling and augmentation draw from each process's
random state), silently. So the other ranks iterate stand-ins, which yield an `AwaitedBatch` whenever the first stage
has loaded one and end exactly when it ends; the batch itself follows in the strategy's ``batch_to_device``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

from lightning_autopipe.strategy.communicator import Communicator

_LOADING_STAGE = 0
_OWN_ATTRIBUTES = frozenset(
    {"loader", "_communicator", "_replicas_end_together", "_remember_first", "_before_iteration", "_length", "_running"}
)
_COMBINED_LOADER_MODULES = (
    "lightning.pytorch.utilities.combined_loader",
    "pytorch_lightning.utilities.combined_loader",
)


class AwaitedBatch:
    """Stands for a batch that the first stage has loaded and will send."""

    def __repr__(self) -> str:
        return "AwaitedBatch()"


class PipelineLoader:
    """Wraps the loader of one rank; Lightning's loops iterate it in step on all ranks of a pipeline.

    Everything else that is asked of it (``sampler``, ``dataset``, ``batch_sampler``, ...) is answered by the loader
    itself. User code that iterates it (a callback that draws a sample batch, say) gets that loader's own batches.

    Args:
        loader: What the user or Lightning made.
        communicator: This rank's groups; constructing a `PipelineLoader` is a collective call.
        replicas_end_together: Whether all replicas end as soon as one of them has no more batches.
        remember_first: Keep the first batch of an iteration, so that `peek` can still give it; until `forget_first`.
        before_iteration: Called before Lightning begins to iterate it.
    """

    loader: Any

    def __init__(
        self,
        loader: Any,
        communicator: Communicator,
        *,
        replicas_end_together: bool,
        remember_first: bool = False,
        before_iteration: Callable[[], None] | None = None,
    ) -> None:
        self.loader = loader
        self._communicator = communicator
        self._replicas_end_together = replicas_end_together
        self._remember_first = remember_first
        self._before_iteration = before_iteration
        self._length = -1
        self._running: _InStepIterator | None = None
        self._agree_on_length()

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError(f"object of type {type(self.loader).__name__!r} has no len()")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if not _called_by_lightnings_loops():
            return iter(self.loader)
        self._agree_on_length()
        if self._before_iteration is not None:
            self._before_iteration()
        self._running = _InStepIterator(self)
        return self._running

    def peek(self) -> Any:
        """The first batch of the iteration that Lightning has begun, which it will be (or was) given as well.

        Raises:
            StopIteration: there is none.
        """
        assert self._running is not None, "Lightning has not begun to iterate this loader"
        return self._running.peek()

    def forget_first(self) -> None:
        """Lets go of a remembered first batch, now and in later iterations."""
        self._remember_first = False
        if self._running is not None:
            self._running.forget_first()

    def _agree_on_length(self) -> None:
        # Asked again for every iteration: a batch sampler's length may change from epoch to epoch.
        length = sized_len(self.loader)
        with self._communicator.guard():
            (self._length,) = self._communicator.broadcast_numbers(
                [-1 if length is None else length], stage_index=_LOADING_STAGE
            )

    def _state_dict(self) -> Any:
        state = self.loader.state_dict() if self._communicator.is_first_stage else None
        return self._communicator.broadcast_in_pipeline(state, stage_index=_LOADING_STAGE)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_ATTRIBUTES:
            raise AttributeError(name)
        value = getattr(self.loader, name)
        # Only the first stage's loader has advanced, but rank 0 writes the checkpoint.
        return self._state_dict if name == "state_dict" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)


class _InStepIterator(Iterator[Any]):
    """One iteration over a `PipelineLoader`."""

    def __init__(self, owner: PipelineLoader) -> None:
        self._owner = owner
        self._communicator = owner._communicator
        self._iterator = iter(owner.loader) if self._communicator.is_first_stage else None
        self._ahead: list[Any] = []
        self._first: list[Any] = []
        self._num_fetched = 0
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ahead.pop(0) if self._ahead else self._fetch()

    def peek(self) -> Any:
        if not self._first:
            assert self._num_fetched == 0, "the first batch was not remembered"
            remembered = self._owner._remember_first
            self._owner._remember_first = True
            self._ahead.append(self._fetch())
            self._owner._remember_first = remembered
        return self._first[0]

    def forget_first(self) -> None:
        self._first.clear()

    def _fetch(self) -> Any:
        if self._has_ended:
            raise StopIteration
        batch, has_batch = self._load()
        with self._communicator.guard():
            goes_on = self._goes_on(has_batch)
            if goes_on:
                self._share_indices()
        if not goes_on:
            self._has_ended = True
            raise StopIteration
        if self._owner._remember_first and self._num_fetched == 0:
            self._first.append(batch)
        self._num_fetched += 1
        return batch

    def _load(self) -> tuple[Any, bool]:
        if self._iterator is None:
            return AwaitedBatch(), True
        try:
            return next(self._iterator), True
        except StopIteration:
            return None, False

    def _goes_on(self, has_batch: bool) -> bool:
        """Whether there is another batch: what the first stages say."""
        goes_on = has_batch
        if self._communicator.is_first_stage and self._owner._replicas_end_together:
            goes_on = self._communicator.all_replicas_agree(has_batch)
            if has_batch and not goes_on:
                # Not rank_zero_warn: rank 0 does not load.
                warnings.warn(
                    f"replica {self._communicator.replica_index} has a batch left where another replica has none; "
                    "replicas end together, so it is dropped. Give every replica the same number of batches.",
                    stacklevel=2,
                )
        (answer,) = self._communicator.broadcast_numbers([int(goes_on)], stage_index=_LOADING_STAGE)
        return bool(answer)

    def _share_indices(self) -> None:
        """Tells the other ranks which samples a predicted batch holds: prediction writers ask for it there."""
        sampler = getattr(self._owner.loader, "batch_sampler", None)
        if not isinstance(sampler, _IndexBatchSamplerWrapper):
            return
        indices = sampler.seen_batch_indices[self._num_fetched] if self._communicator.is_first_stage else None
        indices = self._communicator.broadcast_in_pipeline(indices, stage_index=_LOADING_STAGE)
        if not self._communicator.is_first_stage:
            if self._num_fetched == 0:
                sampler.seen_batch_indices = []
            sampler.seen_batch_indices.append(indices)


def _called_by_lightnings_loops() -> bool:
    # Two frames up: the caller of PipelineLoader.__iter__. Lightning's loops iterate through a CombinedLoader only.
    return sys._getframe(2).f_globals.get("__name__") in _COMBINED_LOADER_MODULES
