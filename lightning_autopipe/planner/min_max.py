"""Splits layers into contiguous stages so that the heaviest stage is as light as possible."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.partition import Partition


def min_max_partition(costs: Sequence[float], num_stages: int) -> Partition:
    """The most even of the partitions with the lightest heaviest stage; every stage owns at least one layer.

    Of all partitions into contiguous, non-empty stages whose heaviest stage is the lightest possible, it is the one
    with the least sum of squared stage costs (42 equal layers on 16 stages become ten of 3 and six of 2, not thirteen
    of 3 and three of 1); of equal ones, the one with more layers earlier. Both are exact.

    Args:
        costs: work of each layer, >= 0, in any unit.
        num_stages: 1 to the number of layers.

    Raises:
        ConfigurationError: there are more stages than layers, or a cost is negative or not finite.

    Source:
        The start of AutoPipe's planner (Liu et al., IEEE CLUSTER 2022): ``D[i][p] = min over j of max(D[j][p-1],
        S[i] - S[j])`` with prefix sums S. D rises with j and S[i] - S[j] falls, so the best j is found by bisection:
        O(L·n·log L) for L layers on n stages.
    """
    _check(costs, num_stages)
    prefix = list(accumulate(costs, initial=0))
    bottleneck = _lightest_bottleneck(prefix, num_stages)
    return Partition(cut_points=_most_even_cuts(prefix, num_stages, bottleneck), num_layers=len(costs))


def check_enough_layers(num_stages: int, num_layers: int) -> None:
    """Raises ConfigurationError where a stage would have no layer."""
    if num_stages > num_layers:
        raise ConfigurationError(
            f"num_stages={num_stages} is more than the {num_layers} layers that the module can be cut into: a stage "
            f"owns at least one; set num_stages to at most {num_layers} (more processes can run as num_replicas)"
        )


def _check(costs: Sequence[float], num_stages: int) -> None:
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ConfigurationError(f"num_stages must be an integer >= 1, got {num_stages!r}; set num_stages")
    check_enough_layers(num_stages, len(costs))
    for layer_index, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise ConfigurationError(f"the cost of layer {layer_index} must be finite and >= 0, got {cost!r}")


def _lightest_bottleneck(prefix: Sequence[float], num_stages: int) -> float:
    num_layers = len(prefix) - 1
    # best[i]: the lightest heaviest stage of the first i layers on the stages so far.
    best = list(prefix)
    for num_used in range(2, num_stages + 1):
        before = best
        best = [math.inf] * num_used
        for end in range(num_used, num_layers + 1):
            cuts = range(num_used - 1, end)
            crossing = bisect_left(cuts, True, key=lambda cut: before[cut] >= prefix[end] - prefix[cut])
            candidates = cuts[max(0, crossing - 1) : crossing + 1]
            best.append(min(max(before[cut], prefix[end] - prefix[cut]) for cut in candidates))
    return best[num_layers]


def _most_even_cuts(prefix: Sequence[float], num_stages: int, bottleneck: float) -> tuple[int, ...]:
    num_layers = len(prefix) - 1
    # least[i]: the least sum of squares of layers i.. on the stages so far, counted from the last; inf: impossible.
    least = [(prefix[-1] - start) ** 2 if prefix[-1] - start <= bottleneck else math.inf for start in prefix]
    least[num_layers] = math.inf
    ends_by_stage: list[list[int]] = []
    for num_used in range(2, num_stages + 1):
        behind = least
        least, ends = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
        for begin in range(num_layers - num_used + 1):
            for end in range(begin + 1, num_layers - num_used + 2):
                cost = prefix[end] - prefix[begin]
                if cost > bottleneck:
                    break
                squares = cost**2 + behind[end]
                if squares <= least[begin]:
                    least[begin], ends[begin] = squares, end
        ends_by_stage.append(ends)
    cuts: list[int] = []
    for ends in reversed(ends_by_stage):
        cuts.append(ends[cuts[-1] if cuts else 0])
    return tuple(cuts)
