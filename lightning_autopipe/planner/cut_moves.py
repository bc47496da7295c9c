"""Partitions next to a partition."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

Cuts = tuple[int, ...]


def shifted(cuts: Cuts, num_layers: int, lengths: range | None = None) -> Iterator[Cuts]:
    """Runs of neighbouring cuts, moved by a layer together: from one end of the run to the other.

    Args:
        cuts: to begin with.
        num_layers: of the model.
        lengths: of the runs; None: all.
    """
    edges = (0, *cuts, num_layers)
    for length in range(1, len(cuts) + 1) if lengths is None else lengths:
        for first in range(len(cuts) + 1 - length):
            last = first + length
            if edges[last + 1] - edges[last] > 1:
                yield (*cuts[:first], *(cut + 1 for cut in cuts[first:last]), *cuts[last:])
            if edges[first + 1] - edges[first] > 1:
                yield (*cuts[:first], *(cut - 1 for cut in cuts[first:last]), *cuts[last:])


def slid(
    cuts: Cuts, weights: Sequence[Sequence[float]], entries: Sequence[Sequence[float]], limit: float
) -> Iterator[Cuts]:
    """Each cut at every other layer at which neither stage beside it adds more to the step than a limit.

    Args:
        cuts: to begin with.
        weights: by stage, prefix sums over the layers of what they add.
        entries: by stage, the price of beginning at each layer.
        limit: the most that a stage may add.
    """
    edges = (0, *cuts, len(weights[0]) - 1)
    for index, cut in enumerate(cuts):
        start, stop = edges[index], edges[index + 2]
        before, behind = weights[index], weights[index + 1]
        first = bisect_left(behind, behind[stop] - limit, start + 1, stop)
        last = bisect_right(before, before[start] + limit - entries[index][start], start + 1, stop)
        for other in range(first, last):
            if abs(other - cut) > 1:
                yield (*cuts[:index], other, *cuts[index + 1 :])


class CheaperCuts:
    """Moves single cuts past dearer ones, which moves by a layer would have to climb over.

    A cut goes to the next one before it, and behind it, that costs less, or that costs less than those around it.

    Args:
        entries: by stage, the price of beginning at each layer.
    """

    def __init__(self, entries: Sequence[Sequence[float]]) -> None:
        self._entries = entries
        self._num_layers = len(entries[0]) - 1
        self._ways: dict[int, tuple[list[int], list[int], list[int]]] = {}

    def jumped(self, cuts: Cuts) -> Iterator[Cuts]:
        """Partitions in which one cut has gone further than to the next layer."""
        edges = (0, *cuts, self._num_layers)
        for index, cut in enumerate(cuts):
            for other in self._targets(index + 1, cut):
                if edges[index] < other < edges[index + 2] and abs(other - cut) > 1:
                    yield (*cuts[:index], other, *cuts[index + 1 :])

    def _targets(self, stage_index: int, cut: int) -> dict[int, None]:
        if stage_index not in self._ways:
            entry = self._entries[stage_index]
            self._ways[stage_index] = _next_less(entry), _next_less(entry[::-1]), _valleys(entry)
        behind, before, valleys = self._ways[stage_index]
        here, after = bisect_left(valleys, cut), bisect_right(valleys, cut)
        nearest = (*valleys[max(0, here - 1) : here], *valleys[after : after + 1])
        return dict.fromkeys((behind[cut], self._num_layers - before[self._num_layers - cut], *nearest))


def _valleys(entry: Sequence[float]) -> list[int]:
    """Cuts that cost no more than those next to them, and less than one of these."""
    triples = zip(entry, entry[1:], entry[2:], strict=False)
    return [cut for cut, (a, b, c) in enumerate(triples, start=1) if b <= a and b <= c and (b < a or b < c)]


def _next_less(values: Sequence[float]) -> list[int]:
    """For each position the next one with a smaller value; beyond the end where there is none."""
    found = [len(values)] * len(values)
    waiting: list[int] = []
    for position, value in enumerate(values):
        while waiting and values[waiting[-1]] > value:
            found[waiting.pop()] = position
        waiting.append(position)
    return found
