"""What stages that are left over take at least, by the devices and layers that are left: for branch and bound."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, product

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.planner.cost import Work
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.replica import Depths

_NUM_LIMITS = 24
"""Of what a stage may add, for which tables are made."""
_NUM_HALVINGS = 8

Used = tuple[int, ...]
"""How many devices of each kind run the stages so far."""


class OrderTables:
    """For several limits of what a stage may add to the way of one micro-batch: the least time of that way.

    Args:
        setting: with one replica and no links.
        depths: of the warm-up.
        kinds: devices that are alike, in groups.
        limit_s: seconds that a step may take.
    """

    def __init__(
        self, setting: PipelineSetting, depths: Depths, kinds: Sequence[Sequence[Device]], limit_s: float
    ) -> None:
        self._num_layers = setting.cost.num_layers
        self._counts = tuple(map(len, kinds))
        num_microbatches = setting.num_microbatches[0]
        self.forwards: list[Sequence[float]] = []
        """By kind, sums over layers."""
        self.times: list[list[float]] = []
        """By kind, sums over layers of forward and backward."""
        self.adds: list[list[list[float]]] = []
        """By kind and stage, sums over layers of what they add: all micro-batches but one, less those forwards, or
        backwards, that run while the stage waits once for those behind it."""
        for kind in kinds:
            forward, backward = (
                setting.cost.prefix_s(work, device=kind[0], microbatch_size=setting.microbatch_size)
                for work in (Work.FORWARD, Work.BACKWARD)
            )
            both = [f + b for f, b in zip(forward, backward, strict=True)]
            shorter = min(forward, backward, key=lambda sums: sums[-1])
            rest = num_microbatches - 1
            self.forwards.append(forward)
            self.times.append(both)
            self.adds.append(
                [[rest * t - min(depth, rest) * s for t, s in zip(both, shorter, strict=True)] for depth in depths]
            )
        self._waits = [_waits(num_microbatches, depth) for depth in depths[:-1]] + [[]]
        self._make(limit_s)

    def _make(self, limit_s: float) -> None:
        """Limits of what a stage adds, and for each the least time through the stages that are left."""
        layers = range(self._num_layers)
        most = limit_s - sum(min(of[layer + 1] - of[layer] for of in self.times) for layer in layers)
        low, high = 0.0, most
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            if math.isinf(self._through(middle)[(0,) * len(self._counts)][0]):
                low = middle
            else:
                high = middle
        self._limits = [low + (most - low) * (index + 1) / _NUM_LIMITS for index in range(_NUM_LIMITS)]
        self._least_added_s = low
        before = [low, *self._limits]
        tables = [self._through(limit) for limit in self._limits]
        # By devices used, layer and limit: the least time through the rest; and the least of all sums of such a time
        # and what a stage adds, from this limit on.
        self._through_s = {
            used: [list(of_limits) for of_limits in zip(*(table[used] for table in tables), strict=True)]
            for used in tables[0]
        }
        self._sums_s = {
            used: [_least_from_here_on([*map(float.__add__, row, before), math.inf]) for row in rows]
            for used, rows in self._through_s.items()
        }

    def _through(self, limit: float) -> dict[Used, list[float]]:
        """By devices used and the next layer, the least time through all stages left, of which none adds more."""
        num_layers = self._num_layers
        all_used = self._counts
        every = sorted(product(*(range(number + 1) for number in all_used)), key=sum, reverse=True)
        found: dict[Used, list[float]] = {all_used: [math.inf] * num_layers + [0.0]}
        for used in every[1:]:
            stage_index = sum(used)
            row = found[used] = [math.inf] * (num_layers + 1)
            for kind, following in self.following(used):
                times, behind = self.times[kind], found[following]
                # What a stage that ends at a layer adds, less what one that began there would; never falling.
                adds = [(self.adds[kind][stage_index], self.adds[kind][stage_index])]
                for num_waits, num_computed in self._waits[stage_index]:
                    computed = [(num_computed - 1) * seconds for seconds in times]
                    ends = [seconds + (num_waits - 1) * rest for seconds, rest in zip(computed, behind, strict=True)]
                    adds.append((computed, _least_from_here_on(ends)))
                # Ends of the stage that are within the limit; those behind which less time is left first.
                window: deque[tuple[float, int]] = deque()
                for start in range(num_layers - 1, -1, -1):
                    value = times[start + 1] + behind[start + 1]
                    while window and window[-1][0] >= value:
                        window.pop()
                    window.append((value, start + 1))
                    for begins, ends in adds:
                        most = begins[start] + limit
                        while window and ends[window[0][1]] > most:
                            window.popleft()
                    if window and window[0][0] - times[start] < row[start]:
                        row[start] = window[0][0] - times[start]
        return found

    def following(self, used: Used) -> list[tuple[int, Used]]:
        """Kinds of which there are devices left, with what is used then."""
        return [
            (kind, (*used[:kind], used[kind] + 1, *used[kind + 1 :]))
            for kind, count in enumerate(self._counts)
            if used[kind] < count
        ]

    def least_s(self, used: Used, layer: int, added_s: float, most_s: float) -> float:
        """What the stages left over take at least, and the most that any stage adds.

        Args:
            used: devices of the stages so far.
            layer: the next one.
            added_s: the most that a stage so far adds.
            most_s: what the stages left over may take.
        """
        row, sums = self._through_s[used][layer], self._sums_s[used][layer]
        index = bisect_left(self._limits, added_s)
        if index < _NUM_LIMITS and row[index] < most_s:
            here_s: float = row[index] + max(added_s, self._least_added_s)
            return min(here_s, sums[index + 1])
        while index < _NUM_LIMITS and row[index] >= most_s:
            index += 1
        return sums[index]


def _waits(num_microbatches: int, depth: int) -> list[tuple[int, int]]:
    """How often a stage may wait for those behind it, and how many micro-batches it computes besides.

    Two waits, and as many as there can be; see `pipeline_bound_s`.
    """
    most = 1 + (num_microbatches - 1) // (depth + 1)
    return [(number, num_microbatches - (number - 1) * depth) for number in sorted({2, most}) if most > 1]


def _least_from_here_on(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values), min))[::-1]
