"""Splits the batches of a module's steps, in a way that is found out once for each kind of batch."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.runtime.batch import BatchSplit, assume_split, find_split, microbatch_sizes, structure_of
from lightning_autopipe.runtime.step_capture import CaptureStore


class BatchSplitter:
    """Into how many micro-batches batches are split, along which dimensions, and how large each is.

    Args:
        store: Traces the steps of the module.
        num_microbatches: Of one replica's batch.
        given: The user's `split_batch`.
        trusts_sizes: Whether leaves of the batch's size have one entry a sample, where the step runs either way.
    """

    def __init__(
        self,
        store: CaptureStore,
        *,
        num_microbatches: int,
        given: Mapping[str, int | None] | None,
        trusts_sizes: bool,
    ) -> None:
        self.num_microbatches = num_microbatches
        self.given = given
        self._store = store
        self._trusts_sizes = trusts_sizes
        self._splits: dict[Hashable, BatchSplit] = {}

    @property
    def min_samples(self) -> int:
        """The fewest samples of a micro-batch: batch normalization has no statistics of one."""
        return 2 if any(isinstance(m, _BatchNorm) and m.training for m in self._store.module.modules()) else 1

    def batch_size(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Give the number of samples of a batch, having found out how it is split.

        Raises:
            BatchError: that cannot be told.
        """
        return self.split_of(step_name, args, kwargs).batch_size((args, kwargs))

    def split_into(
        self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> list[Any]:
        """Split a batch as it would be with that many micro-batches."""
        self.num_microbatches, before = num_microbatches, self.num_microbatches
        try:
            split = self.split_of(step_name, args, kwargs)
            sizes = self.sizes(split, (args, kwargs))
        finally:
            self.num_microbatches = before
        return split.split((args, kwargs), sizes)

    def sizes(self, split: BatchSplit, batch: Any) -> tuple[int, ...]:
        """Give the samples of each micro-batch of a batch, `(args, kwargs)`."""
        return microbatch_sizes(split.batch_size(batch), self.num_microbatches, min_samples=self.min_samples)

    def split_of(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSplit:
        """Give the way in which batches like this one are split.

        Raises:
            BatchError: no way or more than one way keeps the step running.
        """
        key = (step_name, structure_of((args[:1], kwargs)), self.num_microbatches > 1)
        split = self._splits.get(key)
        if split is None:
            split = self._splits[key] = self._find(step_name, args, kwargs)
        return split

    def _find(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSplit:
        if self.num_microbatches == 1:
            return assume_split((args[:1], kwargs))
        whole, _ = self._store.trace(step_name, args, kwargs)

        def probe(batch: Any) -> frozenset[int] | None:
            try:
                with warnings.catch_warnings():  # of shapes that are tried only
                    warnings.simplefilter("ignore")
                    trace, _ = self._store.trace(step_name, (*batch[0], *args[1:]), batch[1])
            except CaptureError:
                return None
            if _kind_of_end(trace) != _kind_of_end(whole):
                return None
            # Where the whole batch's trace ended early, an error of shapes may look alike: it comes at another place.
            same_place = whole.end_reason is None or len(trace.operations) == len(whole.operations)
            return trace.inputs_read if same_place else None

        return find_split((args[:1], kwargs), probe, given=self.given, trusts_sizes=self._trusts_sizes)


def _kind_of_end(trace: StepTrace) -> str | None:
    return None if trace.end_reason is None else trace.end_reason.split()[0]
