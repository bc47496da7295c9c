"""Several batches as one longer pipeline: the window of an accumulation.

Each batch is split, weighted and logged as it would be by itself; only the schedule goes on from one to the next, and
does not run empty between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.runtime.executor import ExecutionObserver
from lightning_autopipe.runtime.stage import StageForward, StageOutput
from lightning_autopipe.runtime.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of a step."""

    args: tuple[Any, ...]
    """What Lightning passes to it; the batch is the first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    step: int
    """Number of the step, which keys its random draws."""
    loss_scale: float = 1.0
    """What weighted losses are multiplied by; equal in all replicas."""
    finish_loss: Callable[[Tensor], Tensor] | None = None
    """What is made of each loss, weighted and scaled, right before it is back-propagated; linear, equal everywhere."""


def units_by_batch(units: Sequence[Unit], num_microbatches: Sequence[int]) -> list[list[Unit]]:
    """Give each batch its units, with micro-batches numbered from 0.

    Args:
        units: Of the window, in order.
        num_microbatches: Of each batch.
    """
    found: list[list[Unit]] = [[] for _ in num_microbatches]
    firsts = [sum(num_microbatches[:position]) for position in range(len(num_microbatches))]
    for microbatch_index, slice_index in units:
        position = max(index for index, first in enumerate(firsts) if first <= microbatch_index)
        found[position].append((microbatch_index - firsts[position], slice_index))
    return found


class WindowStage(StageForward):
    """One stage of the steps of a window.

    Args:
        steps: The stage of each batch's step.
        num_units: Of each batch.
        before_unit: Called with the position of a batch in the window before each forward of its units.
    """

    def __init__(
        self,
        steps: Sequence[StageForward],
        num_units: Sequence[int],
        before_unit: Callable[[int], None] | None,
    ) -> None:
        self._steps = steps
        self._places = [(position, index) for position, number in enumerate(num_units) for index in range(number)]
        self._before_unit = before_unit

    def signature(self, unit_index: int) -> Hashable:
        position, index = self._places[unit_index]
        return self._steps[position].signature(index)

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        position, index = self._places[unit_index]
        if self._before_unit is not None:
            self._before_unit(position)
        return self._steps[position].forward(index, received)


class BatchEnds:
    """An observer that tells when all gradients of one batch are there and none of the next one.

    Args:
        schedule: Of the window.
        pipeline_rank: Whose list of actions runs.
        num_microbatches: Of each batch.
        after_batch: Called with the position of each batch but the last, after it.
        observer: Told as well.
    """

    def __init__(
        self,
        schedule: Schedule,
        pipeline_rank: int,
        num_microbatches: Sequence[int],
        after_batch: Callable[[int], None],
        observer: ExecutionObserver | None,
    ) -> None:
        self._positions = [position for position, number in enumerate(num_microbatches) for _ in range(number)]
        self._after_batch = after_batch
        self._observer = observer
        ends = [action for action in schedule.actions_by_rank[pipeline_rank] if action.type.ends_backward]
        order = [self._positions[action.microbatch_index] for action in ends]
        if order != sorted(order):
            raise PlanError(
                f"Schedule {schedule.name!r} begins the backwards of a batch before those of the batch before it have "
                "ended, so their gradients, which are divided by weights of their own, cannot be told apart. Set "
                "merge_accumulation=False, or schedule='1f1b'."
            )
        self._num_left = Counter(order)

    def ran(self, action: Action, waited_from_s: float, started_s: float, ended_s: float) -> None:
        if self._observer is not None:
            self._observer.ran(action, waited_from_s, started_s, ended_s)
        if not action.type.ends_backward:
            return
        position = self._positions[action.microbatch_index]
        self._num_left[position] -= 1
        if not self._num_left[position] and position < self._positions[-1]:
            self._after_batch(position)
