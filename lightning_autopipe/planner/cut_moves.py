"""Partitions next to a partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Cuts = tuple[int, ...]


def shifted(cuts: Cuts, num_layers: int) -> Iterator[Cuts]:
    """Runs of neighbouring cuts, moved by a layer together: from one end of the run to the other."""
    edges = (0, *cuts, num_layers)
    for length in range(1, len(cuts) + 1):
        for first in range(len(cuts) + 1 - length):
            last = first + length
            if edges[last + 1] - edges[last] > 1:
                yield (*cuts[:first], *(cut + 1 for cut in cuts[first:last]), *cuts[last:])
            if edges[first + 1] - edges[first] > 1:
                yield (*cuts[:first], *(cut - 1 for cut in cuts[first:last]), *cuts[last:])


class CheaperCuts:
    """Moves single cuts past dearer ones, which moves by a layer would have to climb over.

    Args:
        entries: by stage, the price of beginning at each layer.
    """

    def __init__(self, entries: Sequence[Sequence[float]]) -> None:
        self._ways = [(_next_less(entry), _next_less(entry[::-1])) for entry in entries[1:]]

    def jumped(self, cuts: Cuts) -> Iterator[Cuts]:
        """Each cut at the next one before it, and behind it, where its stage begins at less cost."""
        for index, (cut, (behind, before)) in enumerate(zip(cuts, self._ways, strict=True)):
            num_layers = len(behind) - 1
            lowest = cuts[index - 1] if index else 0
            highest = cuts[index + 1] if index + 1 < len(cuts) else num_layers
            for other in (behind[cut], num_layers - before[num_layers - cut]):
                if lowest < other < highest and abs(other - cut) > 1:
                    yield (*cuts[:index], other, *cuts[index + 1 :])


def _next_less(values: Sequence[float]) -> list[int]:
    """For each position the next one with a smaller value; beyond the end where there is none."""
    found = [len(values)] * len(values)
    waiting: list[int] = []
    for position, value in enumerate(values):
        while waiting and values[waiting[-1]] > value:
            found[waiting.pop()] = position
        waiting.append(position)
    return found
