"""Partitions to begin a search with where links are slow, or memory is short: cuts at which little crosses."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

from lightning_autopipe.planner.starts import Cuts

Fits = Callable[[int, int, int], bool]
"""Of a stage, its first layer, and the one after its last: whether its device has room for them."""

_ROUNDING = 1 + 1e-12
_NUM_HALVINGS = 12
"""Of limits: searches only begin from what is found."""
_MIN_LIMITS, _MAX_LIMITS = 5, 20
_LAYERS_LIMITED = 6_000
"""Layers times stages that are gone through for all limits together, where that makes more than the least number."""
_SLACKS = (_ROUNDING, 1.05, 1.4)
"""How much heavier than the lightest heaviest stage one may be to make cuts cheaper."""
_NUM_HALVINGS_TO_FIT = 7
_HEAVIEST = 4.0
"""And where memory is short."""
_NUM_PRICES = 8
"""Limits of what a cut may cost, in `cheap_cuts`."""


def cheap_cuts(weights: Sequence[Sequence[float]], entries: Sequence[Sequence[float]]) -> Iterator[Cuts]:
    """Like `quick_cuts`, but no stage begins where that costs more than a limit; for some limits, from the least on.

    Where links are slow, a cut at which little crosses is worth uneven stages.

    Args:
        weights: as `quick_cuts` takes them.
        entries: by stage, the price of beginning at each layer.
    """
    num_stages, num_layers = len(weights), len(weights[0]) - 1
    prices = sorted({price for entry in entries[1:] for price in entry[1:num_layers]})
    step = max(1, -(-len(prices) // _NUM_PRICES))
    for price in prices[:-1:step]:  # with the last one every cut is allowed, as in `quick_cuts`
        highest = num_layers
        allowed: list[list[int]] = []  # for each stage but the last, where it may end
        for stage_index in range(num_stages - 1, 0, -1):
            entry = entries[stage_index]
            allowed.append([cut for cut in range(stage_index, highest) if entry[cut] <= price])
            if not allowed[-1]:
                break
            highest = allowed[-1][-1]
        else:
            yield _halved(weights, allowed[::-1])


def lopsided_cuts(num_stages: int, num_layers: int) -> Iterator[Cuts]:
    """For each stage the partition in which all others own a single layer, so that little is on the way to a link."""
    for stage_index in range(num_stages):
        num_later = num_stages - 1 - stage_index
        yield (*range(1, stage_index + 1), *range(num_layers - num_later, num_layers))


def _halved(weights: Sequence[Sequence[float]], allowed: Sequence[Sequence[int]]) -> Cuts:
    """The limit halved until stages that end where they may are about even."""
    low, high = 0.0, max(weight[-1] for weight in weights)
    best = _filled_where_allowed(weights, allowed, math.inf)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        cuts = _filled_where_allowed(weights, allowed, middle)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    assert best is not None, "without a limit every stage but the last ends as late as it may"
    return best


def _filled_where_allowed(
    weights: Sequence[Sequence[float]], allowed: Sequence[Sequence[int]], limit: float
) -> Cuts | None:
    cuts: list[int] = []
    start = 0
    for weight, ends in zip(weights, allowed, strict=False):
        last = bisect_right(weight, weight[start] + limit, start) - 1
        end = bisect_right(ends, last) - 1
        if end < 0 or ends[end] <= start:
            return None
        start = ends[end]
        cuts.append(start)
    return tuple(cuts) if weights[-1][-1] - weights[-1][start] <= limit else None


def cheapest_cuts(
    weights: Sequence[Sequence[float]],
    entries: Sequence[Sequence[float]],
    prefixes: Sequence[Sequence[float]],
    lightest: float,
    fits: Fits | None = None,
) -> list[Cuts]:
    """Cuts with which one micro-batch is quickest through all stages and back, for several limits of a stage's weight.

    Args:
        weights: by stage, prefix sums over the layers of what they weigh on it.
        entries: by stage, what beginning at each layer takes.
        prefixes: by stage, prefix sums over the layers of what they take.
        lightest: what the heaviest stage weighs at least.
        fits: whether a stage's device has room for a range of layers; None: it has.
    """
    remembered = functools.cache(fits) if fits else None

    def quickest(limit: float) -> Cuts | None:
        return quickest_cuts(weights, entries, prefixes, limit, remembered)

    found = [quickest(limit) for limit in _limits(weights, lightest)]
    if fits is not None:  # what fits may weigh more: about how much at least is found by halving
        low, high = lightest, _HEAVIEST * lightest
        for _ in range(_NUM_HALVINGS_TO_FIT):
            middle = (low + high) / 2
            found.append(quickest(middle))
            low, high = (middle, high) if found[-1] is None else (low, middle)
    return list(dict.fromkeys(cuts for cuts in found if cuts is not None))


def _limits(weights: Sequence[Sequence[float]], lightest: float) -> list[float]:
    """From one that few partitions keep to one that all do that are worth a look; a single layer may be heavier."""
    low, least = 0.0, lightest
    for _ in range(_NUM_HALVINGS):
        middle = (low + least) / 2
        start = 0
        for weight in weights:
            start = max(start + 1, bisect_right(weight, weight[min(start, len(weight) - 1)] + middle) - 1)
        if start >= len(weights[0]) - 1:
            least = middle
        else:
            low = middle
    steps = min(_MAX_LIMITS, max(_MIN_LIMITS, _LAYERS_LIMITED // (len(weights) * len(weights[0]))))
    ratio = (lightest / least) ** (1 / steps) if least > 0 else 1.0
    between = [least * ratio**step for step in range(steps)]
    return list(dict.fromkeys([*(limit * _ROUNDING for limit in between), *(slack * lightest for slack in _SLACKS)]))


def quickest_cuts(
    weights: Sequence[Sequence[float]],
    entries: Sequence[Sequence[float]],
    prefixes: Sequence[Sequence[float]],
    limit: float,
    fits: Fits | None = None,
) -> Cuts | None:
    """The cuts with which one micro-batch is quickest through all stages and back; None where nothing fits.

    ``D[s][j] = min over i of D[s - 1][i] + e[s][i] + P[s][j] - P[s][i]``, for layers i to j - 1 on stage s that weigh
    no more than a limit, or are a single one, and fit.

    Args:
        weights: as in `cheapest_cuts`, as are the others.
        entries: of layers that a stage begins with.
        prefixes: of what layers take.
        limit: of a stage's weight.
        fits: whether there is room.
    """
    num_stages, num_layers = len(weights), len(weights[0]) - 1
    least = [0.0, *[math.inf] * num_layers]
    begins_by_stage: list[list[int]] = []
    for stage_index, (weight, entry, prefix) in enumerate(zip(weights, entries, prefixes, strict=True)):
        prices = [before + own - sums for before, own, sums in zip(least, entry, prefix, strict=True)]
        least, begins = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
        first = stage_index
        last = num_layers - (num_stages - 1 - stage_index)
        for stop in range(stage_index + 1, last + 1) if stage_index < num_stages - 1 else (num_layers,):
            first = min(bisect_left(weight, weight[stop] - limit, first, stop), stop - 1)
            window = prices[first:stop]
            price = min(window, default=math.inf)
            if price == math.inf:
                continue
            begin = first + window.index(price)
            if fits is not None and not fits(stage_index, begin, stop):
                others = sorted((price, begin) for begin, price in enumerate(window, start=first) if price < math.inf)
                fitting = (other for other in others if fits(stage_index, other[1], stop))
                price, begin = next(fitting, (math.inf, 0))
            least[stop], begins[stop] = price + prefix[stop], begin
        begins_by_stage.append(begins)
    if not math.isfinite(least[num_layers]):
        return None
    cuts: list[int] = []
    stop = num_layers
    for begins in begins_by_stage[:0:-1]:
        stop = begins[stop]
        cuts.append(stop)
    return tuple(reversed(cuts))
