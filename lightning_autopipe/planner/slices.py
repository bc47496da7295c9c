"""How many micro-batches go through in halves, at the begin and at the end."""

from __future__ import annotations

import math

from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Cuts, Depths
from lightning_autopipe.planner.scheduled_work import can_halve, scheduled_work
from lightning_autopipe.planner.simulator import simulated_s
from lightning_autopipe.schedules.sliced import NAME as SLICED

_LEAST_SIMULATED, _MOST_SIMULATED, _SIMULATED_ACTIONS = 12, 80, 300_000
"""How many slicings are simulated at least and at most, and how many actions of them in all in between."""
_SAME = 1 + 1e-9


def choose_slices(setting: PipelineSetting, cuts: Cuts, depths: Depths) -> tuple[ScheduleSpec, float] | None:
    """The slicing with the shortest simulated step, and that step; None where halves cannot be priced.

    Stages keep no more than with whole micro-batches and the same depths: a half counts as half of one. Around the
    smallest number that saves all of the startup at even stages some numbers at the begin and at the end are tried;
    those of the best are moved as long as it helps. Halves go as one message where that takes no longer.

    Args:
        setting: what is given; at least two stages.
        cuts: of the layers.
        depths: of the warm-up; a stage keeps at most one more.

    Source:
        Liu et al., *AutoPipe*, IEEE CLUSTER 2022 (slices at the begin; the number for even stages).
    """
    num_microbatches = min(setting.num_microbatches)
    if setting.num_stages < 2 or not can_halve(setting.cost, setting.microbatch_size):
        return None
    num_actions = 2 * setting.num_stages * sum(setting.num_microbatches)
    max_simulated = max(_LEAST_SIMULATED, min(_MOST_SIMULATED, _SIMULATED_ACTIONS // num_actions))
    found: dict[tuple[int, int], float] = {}

    def spec(first: int, last: int, *, merges_slices: bool) -> ScheduleSpec:
        return ScheduleSpec(
            name=SLICED,
            depths=depths,
            num_sliced_first=first,
            num_sliced_last=last,
            merges_slices=merges_slices,
        )

    def step_s(first: int, last: int) -> float:
        if first < 0 or last < 0 or first + last > num_microbatches or first + last == 0:
            return math.inf
        if (first, last) not in found:
            if len(found) >= max_simulated:
                return math.inf
            apart = spec(first, last, merges_slices=False)
            found[first, last] = simulated_s(scheduled_work(setting, cuts, apart))
        return found[first, last]

    start = min(_even_start(setting, cuts), num_microbatches // 2) or 1
    starts = [(first * start, last * start) for last in (0, 1, 2, 4) for first in (1, 0, 2)]
    best = min(starts, key=lambda pair: step_s(*pair))
    while True:
        first, last = best
        moved = [(first + change, last + other) for change in (0, 1, -1, 2, -2) for other in (0, 1, -1, 2, -2)]
        better = min(
            sorted(moved, key=lambda pair: abs(pair[0] - first) + abs(pair[1] - last)), key=lambda p: step_s(*p)
        )
        if not step_s(*better) < step_s(*best):
            break
        best = better
    apart_s = step_s(*best)
    merged = spec(*best, merges_slices=True)
    merged_s = simulated_s(scheduled_work(setting, cuts, merged))
    if merged_s <= apart_s * _SAME:
        return merged, merged_s
    return spec(*best, merges_slices=False), apart_s


def _even_start(setting: PipelineSetting, cuts: Cuts) -> int:
    """Half of what the first forward takes to reach the last stage, in backwards of the last stage."""
    stages = Objective(setting).step_work(cuts, (setting.num_stages,) * setting.num_stages).stages[0]
    backward_s = stages[-1].units[0].backward_s
    startup_s = sum(stage.units[0].forward_s for stage in stages[:-1])
    ranks = setting.ranks[0]
    for stage_index, stage in enumerate(stages[:-1]):
        route = setting.route(ranks[stage_index], ranks[stage_index + 1])
        startup_s += route.occupied_s(stage.units[0].sent_bytes) + route.latency_s
    return max(1, math.ceil(startup_s / (2 * backward_s))) if backward_s else 1
