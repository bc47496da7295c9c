"""What one layer takes for micro-batches of any size, from the sizes that were measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class SizeFit:
    """Seconds by size: ``max(floor, alpha + beta * size)`` through what was measured.

    Small micro-batches take a floor that no size goes below (launching kernels, Python), larger ones a line.

    At a measured size it gives what was measured: the size in use is one of them, and a line through all of them would
    price it by others. Only where a larger one took less, which is noise, neighbours share their mean. Between two
    measured sizes it joins them by a line; but between the last one on the floor and the first one behind it the
    fitted line comes down from the larger one, as far as the time of the smaller one: joining them would be too high
    where the floor ends. So times never fall while the size grows, are never below the smallest size's, and are exactly
    those of the form above where measurements have that form, with two of them behind the floor.

    Args:
        sizes: samples in the micro-batches that were measured, ascending.
        seconds: what they took.
    """

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self._sizes = tuple(sizes)
        self._seconds = _never_falling(seconds)
        self._num_on_floor, self._slope = _fit(self._sizes, self._seconds)

    def at(self, size: float) -> float:
        """Seconds at a size from the smallest to the largest measured one."""
        above = bisect_left(self._sizes, size)
        if self._sizes[above] == size:
            return self._seconds[above]
        low, high = self._sizes[above - 1 : above + 1]
        low_s, high_s = self._seconds[above - 1 : above + 1]
        slope = (high_s - low_s) / (high - low)
        if above == self._num_on_floor:
            slope = max(slope, self._slope)
        return max(low_s, high_s - slope * (high - size))


def _never_falling(seconds: Sequence[float]) -> tuple[float, ...]:
    """Isotonic regression: neighbours that fall are replaced by their mean."""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, num_b), (a, num_a) = pools.pop(), pools.pop()
            pools.append(((a * num_a + b * num_b) / (num_a + num_b), num_a + num_b))
    return tuple(value for value, count in pools for _ in range(count))


def _fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[int, float]:
    """How many of the smallest sizes lie on the floor, and beta: those with the least squared relative error."""
    best = (float("inf"), 0, 0.0)
    for num_on_floor in range(len(sizes) - 1):
        alpha, beta = _line(sizes[num_on_floor:], seconds[num_on_floor:])
        on_floor = seconds[:num_on_floor]
        floor = sum(on_floor) / num_on_floor if num_on_floor else 0.0
        if num_on_floor and alpha + beta * sizes[num_on_floor - 1] > floor:
            continue  # the line would lie above the floor where the floor should be
        fitted = [max(floor, alpha + beta * size) for size in sizes]
        error = sum(((fit - value) * _weight(value)) ** 2 for fit, value in zip(fitted, seconds, strict=True))
        best = min(best, (error, num_on_floor, beta))
    return best[1:]


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Alpha and beta of the line with the least squared relative error."""
    weights = [_weight(value) ** 2 for value in seconds]
    total = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_s = sum(w * value for w, value in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
    beta = sum(
        w * (size - mean_size) * (value - mean_s) for w, size, value in zip(weights, sizes, seconds, strict=True)
    )
    beta = max(0.0, beta / spread)
    return mean_s - beta * mean_size, beta


def _weight(seconds: float) -> float:
    return 1.0 / max(seconds, 1e-12)
