"""One number out of the numbers of several micro-batches and replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(slots=True, kw_only=True)
class Aggregate:
    """What is known of a value after some micro-batches; two of them `merge` into one.

    Sums are float64. An entry of weight 0 counts for nothing, whatever its value: the mean over no token is NaN.
    """

    weighted_sum: float = 0.0
    weight: float = 0.0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    num_entries: int = 0
    num_weighted_entries: int = 0
    first_weighted_value: float = 0.0
    weighted_values_differ: bool = False

    def add(self, value: float, weight: float) -> None:
        """Counts one micro-batch's value."""
        entry = Aggregate(total=value, smallest=value, largest=value, num_entries=1)
        if weight != 0:
            entry.weighted_sum = value * weight
            entry.weight = weight
            entry.num_weighted_entries = 1
            entry.first_weighted_value = value
        self.merge(entry)

    def merge(self, other: Aggregate) -> None:
        """Counts everything that another aggregate has counted."""
        if not self.num_weighted_entries:
            self.first_weighted_value = other.first_weighted_value
        elif other.num_weighted_entries and other.first_weighted_value != self.first_weighted_value:
            self.weighted_values_differ = True
        self.weighted_values_differ |= other.weighted_values_differ
        self.weighted_sum += other.weighted_sum
        self.weight += other.weight
        # A NaN must win here, as it does in torch.min and torch.max.
        has_nan = math.isnan(self.smallest) or math.isnan(other.smallest)
        self.smallest = math.nan if has_nan else min(self.smallest, other.smallest)
        self.largest = math.nan if has_nan else max(self.largest, other.largest)
        self.total += other.total
        self.num_entries += other.num_entries
        self.num_weighted_entries += other.num_weighted_entries

    def value(self, reduction: str) -> float:
        """The value over everything counted.

        Args:
            reduction: ``"mean"`` (by weight; without any weight, plainly), ``"sum"``, ``"min"`` or ``"max"``.
        """
        assert reduction in REDUCTIONS, reduction
        if reduction == "sum":
            return self.total
        if reduction == "min":
            return self.smallest
        if reduction == "max":
            return self.largest
        if not self.num_weighted_entries:
            return self.total / self.num_entries if self.num_entries else math.nan
        # A constant (a learning rate, say) stays what it is to the last bit.
        return self.weighted_sum / self.weight if self.weighted_values_differ else self.first_weighted_value
