"""Partitions to begin a search with: min-max over what each stage adds to the step, by dynamic programming."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

Cuts = tuple[int, ...]

_ROUNDING = 1 + 1e-12
NUM_HALVINGS = 30
"""Of the limit in `quick_cuts`: to a billionth."""


class MinMaxTable:
    """The lightest heaviest stage of the first layers on the first stages, for each number of both.

    ``D[p][i] = min over j of max(D[p - 1][j], W[i] - W[j] + e[j])`` with the prefix sums W of what layers weigh on
    stage p and the price e of entering it at layer j. D rises with j and the rest falls (but for e, which makes this a
    very good start and not the exact optimum), so the best j only rises with i: O(L n).

    Args:
        weights: by stage, prefix sums over the layers.
        entries: by stage, the price of beginning at each layer; empty: none.

    Source:
        The start of AutoPipe's planner (Liu et al., IEEE CLUSTER 2022), with weights of their own for each stage.
    """

    def __init__(self, weights: Sequence[Sequence[float]], entries: Sequence[Sequence[float]] = ()) -> None:
        self._weights = weights
        self._entries = entries or [[0.0] * len(weights[0])] * len(weights)
        num_layers = len(weights[0]) - 1
        self._least: list[list[float]] = [list(weights[0])]
        for stage_index in range(1, len(weights)):
            before, weight, entry = self._least[-1], weights[stage_index], self._entries[stage_index]
            row = [math.inf] * (num_layers + 1)
            crossing = stage_index
            for stop in range(stage_index + 1, num_layers + 1):
                whole, best = weight[stop], math.inf
                while crossing < stop and before[crossing] < whole - weight[crossing] + entry[crossing]:
                    crossing += 1
                for cut in range(max(stage_index, crossing - 2), min(stop, crossing + 2)):
                    last = whole - weight[cut] + entry[cut]
                    heaviest = before[cut] if before[cut] > last else last
                    if heaviest < best:
                        best = heaviest
                row[stop] = best
            self._least.append(row)

    @property
    def lightest(self) -> float:
        """What the heaviest stage weighs at least, all layers on all stages."""
        return self._least[-1][-1]

    def cuts(self, num_stages: int, num_layers: int, *, early: bool) -> Cuts:
        """The cuts of the first layers on the first stages, each as early, or as late, as the table allows.

        Args:
            num_stages: at least 1.
            num_layers: at least as many.
            early: whether the later stages take as much as they can.
        """
        limit = self._least[num_stages - 1][num_layers] * _ROUNDING
        cuts: list[int] = []
        stop = num_layers
        for stage_index in range(num_stages - 1, 0, -1):
            before, weight, entry = self._least[stage_index - 1], self._weights[stage_index], self._entries[stage_index]
            possible = [
                cut
                for cut in range(stage_index, stop)
                if before[cut] <= limit and weight[stop] - weight[cut] + entry[cut] <= limit
            ]
            stop = (possible[0] if early else possible[-1]) if possible else stop - 1
            cuts.append(stop)
        return tuple(reversed(cuts))


def quick_cuts(weights: Sequence[Sequence[float]], entries: Sequence[Sequence[float]] = ()) -> Cuts:
    """Cuts for all stages with which the heaviest one is about as light as it can be, earlier ones as full as it.

    A limit is halved; below it each stage takes the layers that it can, found by bisection in the sums: O(n log L) for
    each limit. Quicker than `MinMaxTable`, for comparing very many settings. Without entries it is as good.

    Args:
        weights: by stage, prefix sums over the layers of what they weigh on it; at least as many layers as stages.
        entries: by stage, the price of beginning at each layer; empty: none.
    """
    entries = entries or [[0.0] * len(weights[0])] * len(weights)
    low, high = 0.0, max(weight[-1] + max(entry) for weight, entry in zip(weights, entries, strict=True))
    best = _filled(weights, entries, high)
    assert best is not None
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        cuts = _filled(weights, entries, middle)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    return best


def _filled(weights: Sequence[Sequence[float]], entries: Sequence[Sequence[float]], limit: float) -> Cuts | None:
    """Stages filled up to a limit; None where layers are left, or a stage can take none."""
    num_stages, num_layers = len(weights), len(weights[0]) - 1
    cuts: list[int] = []
    start = 0
    for stage_index, (weight, entry) in enumerate(zip(weights, entries, strict=True), start=1):
        last = num_layers - (num_stages - stage_index)  # each later stage owns a layer
        stop = bisect_right(weight, weight[start] + limit - entry[start], start, last + 1) - 1
        if stop <= start:
            return None
        cuts.append(stop)
        start = stop
    return tuple(cuts[:-1]) if start == num_layers else None
