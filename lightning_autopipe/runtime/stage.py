"""What the executor needs of a stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True, kw_only=True)  # not frozen: that would take twice as long to make
class StageOutput:
    """What a stage's forward gives for one unit."""

    sent: tuple[Tensor, ...] = ()
    """The values that cross to the next stage, in one fixed order; empty on the last stage."""
    loss: Tensor | None = None
    """The scalar to back-propagate, already weighted; None where there is none (other stages, evaluation)."""
    roots: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None
    """On the last stage, in place of a loss: gives tensors to back-propagate from and their gradients, once all
    units are through."""


class StageForward(Protocol):
    """One stage of a pipeline, called once for each unit of a step.

    Units (micro-batches, or the slices of one) are numbered in the order of the batch, as `units.units_of` lists them.
    To a stage a slice is a smaller micro-batch.
    """

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        """Run the stage on the values that the previous stage sent (none on the first).

        `received` are fresh leaf tensors; each requires a gradient exactly if the sender's tensor did.
        """
        ...

    def signature(self, unit_index: int) -> Hashable:
        """A key; equal keys mean: the values crossing each cut have equal dtypes, shapes, strides and requires_grad.

        Two units that have equal keys on one stage must have equal keys on its neighbours. Whatever changes
        `requires_grad` or dtypes of crossing values (frozen parameters, evaluation, autocast) belongs into the key.
        """
        ...
