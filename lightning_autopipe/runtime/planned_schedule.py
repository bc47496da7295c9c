"""The schedule that a plan names, written out for the micro-batches of each window of batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.units import forwards_first, halve_no_single_samples


class PlannedSchedule:
    """What is planned, and every schedule that was made of it so far.

    Args:
        spec: What is planned.
        num_ranks: Of a pipeline.
        make_schedule: Writes a schedule out for all stages and a number of micro-batches.
    """

    def __init__(
        self,
        spec: str | ScheduleSpec,
        *,
        num_ranks: int,
        make_schedule: Callable[[str | ScheduleSpec, int, int], Schedule],
    ) -> None:
        self.spec = spec
        self.make_schedule = make_schedule
        self._num_ranks = num_ranks
        self._written: dict[Hashable, Schedule] = {}

    def for_training(
        self, sizes: Sequence[Sequence[int]], num_stages: int, *, is_over_batch: bool, min_samples: int
    ) -> Schedule:
        """Give the schedule of a training step on a window of batches.

        Args:
            sizes: Samples of each batch's micro-batches.
            num_stages: Of the whole pipeline.
            is_over_batch: Whether the loss needs the whole batch: all forwards come first.
            min_samples: The fewest samples that may run by themselves.

        Raises:
            PlanError: as of `refuse_sliced_batch_norm`.
        """
        to_halve = list(itertools.chain.from_iterable(sizes))
        num_microbatches = len(to_halve)
        if len(sizes) > 1 and min(to_halve) <= 1:
            to_halve = [1] * num_microbatches  # a batch behind another may have a single sample anywhere
        spec = "gpipe" if is_over_batch else halve_no_single_samples(self.spec, to_halve)
        refuse_sliced_batch_norm(spec, min_samples)
        return self._written_out(spec, num_stages, num_microbatches)

    def forward_only(self, num_stages: int, num_microbatches: int) -> Schedule:
        """Give the schedule of an evaluation."""
        return self._written_out("forward_only", num_stages, num_microbatches)

    def _written_out(self, spec: str | ScheduleSpec, num_stages: int, num_microbatches: int) -> Schedule:
        """Give one and the same object for equal arguments: the executor knows it again."""
        key = spec, num_stages, num_microbatches
        if key not in self._written:
            if isinstance(spec, str) and num_stages > self._num_ranks:
                planned = self.make_schedule(self.spec, num_stages, num_microbatches)
                self._written[key] = forwards_first(planned, spec, with_backwards=spec != "forward_only")
            else:
                self._written[key] = self.make_schedule(spec, num_stages, num_microbatches)
        return self._written[key]


def refuse_sliced_batch_norm(spec: str | ScheduleSpec, min_samples: int) -> None:
    """Raise where parts of micro-batches would be normalized by themselves.

    Raises:
        PlanError: the schedule slices micro-batches of a module with batch normalization in training.
    """
    if isinstance(spec, ScheduleSpec) and spec.is_sliced and min_samples > 1:
        raise PlanError(
            f"The plan's schedule ({spec}) runs halves of micro-batches, but the module has batch normalization in "
            "training mode: each half would be normalized by statistics of its own. Plan without slices (another "
            "schedule=), or freeze the normalization with eval()."
        )
