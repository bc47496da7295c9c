"""Dynamic programming that PipeDream and Piper share: the slowest stage is to be as quick as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .known import Cuts, Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesPlan:
    """Cuts, and how many devices each stage has."""

    cuts: Cuts
    counts: tuple[int, ...]
    objective: float
    """What the peer thinks that the plan is worth; less is better."""


def quickest_slowest_stage(
    stage_s: Callable[[int, int], Matrix],
    crossing_s: Matrix,
    *,
    num_devices: int,
    counts: Sequence[int],
    uses_all: bool,
) -> StagesPlan | None:
    """The cuts and counts with the quickest slowest stage or crossing; None where no plan is possible.

    ``B[k][i] = min over d, j of max(stage(d, k)[i][j], crossing[j], B[k - d][j])`` for layers i and later on k devices.

    Args:
        stage_s: of the devices of a stage and those from it to the end, the prices ``[i][j]`` of layers i to j - 1.
        crossing_s: price of the cut before each layer.
        num_devices: of the cluster.
        counts: that a stage may have.
        uses_all: whether no device may be idle.
    """
    num_layers = len(crossing_s) - 1
    is_empty = np.tri(num_layers + 1, dtype=bool)
    best = np.full((num_devices + 1, num_layers + 1), np.inf)
    best[0, num_layers] = 0.0
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    for num_used in range(1, num_devices + 1):
        for count in counts:
            if count > num_used:
                continue
            behind = np.maximum(best[num_used - count], crossing_s)
            prices = np.where(is_empty, np.inf, np.maximum(stage_s(count, num_used), behind[None, :]))
            ends = prices.argmin(axis=1)
            for start in np.nonzero(prices[np.arange(num_layers + 1), ends] < best[num_used])[0]:
                best[num_used, start] = prices[start, ends[start]]
                chosen[num_used, int(start)] = count, int(ends[start])
    totals = [num_devices] if uses_all else range(1, num_devices + 1)
    left = min(totals, key=lambda number: best[number, 0])
    objective = float(best[left, 0])
    if not np.isfinite(objective):
        return None
    cuts: list[int] = []
    found: list[int] = []
    start = 0
    while left:
        count, start = chosen[left, start]
        found.append(count)
        cuts.append(start)
        left -= count
    return StagesPlan(cuts=tuple(cuts[:-1]), counts=tuple(found), objective=objective)
